"""Any decodable message, from any session, in any order: never an exception, never a broken law."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvass import messages as m
from kvass.core.effects import Faulted, HalfClose, Lost, Opened, PopulatedTo, Received, Send, Tick
from kvass.core.machine import CacheMachine, CoreConfig
from kvass.errors import FrameError
from kvass.types import PAGE, GroupLayout, Limits, RankLayout, Timing
from kvass.wire import framing
from tests.core.rig import BOOT, WIDTH

CONFIG = CoreConfig(
    boot=BOOT,
    arena_bytes=12 * PAGE,
    extent_bytes=2 * PAGE,
    timing=Timing(lease_s=5, reserve_s=5, dma_grace_s=1),
    limits=Limits(
        leases_per_instance=3,
        reservations_per_instance=3,
        keys_per_message=12,
        sessions=5,
        namespaces=3,
        instance_write_share=0.5,
        segment_index_bytes=1024,
    ),
)

# Small pools meet each other; now and then comes anything that decodes.
numbers = st.integers(0, 8) | st.integers(-(1 << 63), (1 << 64) - 1)
ranks = st.integers(-1, 2) | numbers
rank_lists = st.none() | st.lists(ranks, max_size=3).map(tuple)
boots = st.just(BOOT) | st.binary(max_size=20)
blobs = st.lists(st.sampled_from([bytes([i]) * WIDTH for i in range(6)]), max_size=6).map(b"".join)
blobs = blobs | st.binary(max_size=40)
widths = st.just(WIDTH) | numbers
texts = st.sampled_from(["a", "b"]) | st.text(max_size=5)
sevens = st.just(0) | numbers
times = st.just(0.0) | st.floats()
groups = st.builds(
    GroupLayout,
    kind=st.sampled_from(["full", "full", "full", "state", "sliding_window"]),
    block_tokens=st.just(16) | numbers,
    layers=st.just(("x",)) | st.lists(texts, max_size=3).map(tuple),
    page_bytes=st.sampled_from([(PAGE,), (2 * PAGE,)]) | st.lists(numbers, max_size=3).map(tuple),
    window_tokens=sevens,
)
layouts = st.none() | st.builds(RankLayout, groups=st.lists(groups, max_size=2).map(tuple))
good_layout = RankLayout(groups=(GroupLayout("full", 16, ("x",), (PAGE,)),))

registers = st.builds(
    m.Register,
    seq=numbers,
    instance=texts,
    identity=st.dictionaries(texts, texts, max_size=2),
    chunk_tokens=st.just(16) | numbers,
    rank=ranks,
    ranks=st.just(1) | numbers,
    world_size=st.just(1) | numbers,
    shard=st.just(0) | numbers,
    writer=st.booleans(),
    layout=layouts,
    generation=st.sampled_from([b"", b"", b"new"]) | st.binary(max_size=70),
)
joins = st.builds(
    lambda instance, rank, generation: m.Register(
        seq=1,
        instance=instance,
        identity={},
        chunk_tokens=16,
        rank=rank,
        layout=good_layout if rank == 0 else None,
        generation=generation if rank < 0 else b"",
    ),
    instance=st.sampled_from("ab"),
    rank=st.sampled_from([-1, 0]),
    generation=st.sampled_from([b"", b"", b"one", b"two"]),
)
items = st.builds(
    m.ReserveItem,
    request=texts,
    digests=blobs,
    first=sevens,
    groups=st.just(1) | numbers,
)
spaces = st.sampled_from([b"", b"salt"]) | st.binary(max_size=33)
some_tokens = st.integers(0, 4).map(lambda chunks: bytes(64 * chunks)) | st.binary(max_size=130)
indexings = st.builds(
    lambda digests: m.IndexChunks(
        seq=1, space=b"", digests=digests, tokens=bytes(8 * len(digests)), width=WIDTH
    ),
    digests=blobs,
)
hellos: Any = st.builds(m.Hello, seq=numbers, clock_s=st.just(100.0) | st.floats())
anything: Any = st.one_of(
    hellos,
    st.builds(m.Hello, protocol_min=numbers, protocol_max=numbers, clock_s=st.just(100.0)),
    registers,
    joins,
    st.builds(
        m.Lookup,
        seq=numbers,
        request=texts,
        digests=blobs,
        width=widths,
        first=sevens,
        readers=rank_lists,
        spare=sevens,
        budget_ms=times,
        prefill_tokens_s=times,
    ),
    st.builds(
        m.Prefetch,
        seq=numbers,
        request=texts,
        digests=blobs,
        width=widths,
        namespace=st.binary(max_size=4),
        budget_ms=times,
    ),
    st.builds(m.Reserve, seq=numbers, items=st.lists(items, max_size=3), width=widths),
    st.builds(m.Commit, boot=boots, reservation=numbers, rank=ranks),
    st.builds(m.Abort, boot=boots, reservation=numbers, rank=ranks),
    st.builds(m.Release, boot=boots, lease=numbers, rank=ranks),
    st.builds(
        m.HandedOver,
        boot=boots,
        leases=st.lists(numbers, max_size=2).map(tuple),
        reservations=st.lists(numbers, max_size=2).map(tuple),
    ),
    st.builds(m.Clear, seq=numbers, namespace=st.binary(max_size=4), everything=st.booleans()),
    indexings,
    st.builds(
        m.IndexChunks,
        seq=numbers,
        space=spaces,
        digests=blobs,
        tokens=some_tokens,
        width=widths,
        start=numbers,
        predecessor=st.binary(max_size=9),
    ),
    st.builds(
        m.FindSegments,
        seq=numbers,
        space=spaces,
        tokens=some_tokens,
        width=widths,
        first=numbers,
        min_tokens=numbers,
    ),
    st.builds(
        m.Removals,
        seq=numbers,
        since=numbers,
        width=widths,
        present=st.lists(blobs, max_size=3).map(tuple),
    ),
    st.builds(m.Ping, seq=numbers),
    st.builds(m.Status, seq=numbers),
)
sessions = st.integers(1, 4)
events: Any = st.one_of(
    st.tuples(st.just("say"), sessions, anything),
    st.tuples(st.just("say"), sessions, anything),
    st.tuples(st.just("say"), sessions, joins),
    st.tuples(st.sampled_from(["lost", "fault", "open", "wait", "populated"]), sessions, st.none()),
)


@settings(max_examples=250)
@given(st.lists(events, max_size=60))
def test_no_message_raises_or_breaks_a_law(happenings: list[tuple[str, int, Any]]) -> None:
    machine, now = CacheMachine(CONFIG), 100.0
    numbers_of: dict[int, int] = {}
    opened = 0

    def step(event: Any) -> list[Any]:
        effects = machine.step(event, now)
        machine.validate()
        return effects

    def say(session: int, message: Any) -> list[Any]:
        """As a frame: what does not decode ends its session, as in the daemon."""
        try:
            (decoded,) = framing.from_clients().feed(framing.encode(message))
        except FrameError as fault:
            return step(Faulted(session, fault.code, str(fault)))
        return step(Received(session, decoded))

    def open_one(name: int) -> None:
        nonlocal opened
        opened += 1
        numbers_of[name] = opened
        step(Opened(opened))
        step(Received(opened, m.Hello(seq=1, clock_s=now)))

    for name in range(1, 5):
        open_one(name)
    for what, name, message in happenings:
        session = numbers_of[name]
        if what == "say":
            known = session in machine.state.sessions
            deaf = known and machine.state.sessions[session].ending
            effects = say(session, message)
            answers = [e for e in effects if isinstance(e, Send)]
            assert all(e.session == session for e in effects)
            if isinstance(message, m.Request) and known and not deaf:
                assert len(answers) == 1
                answer = answers[0].message
                fatal = isinstance(answer, m.Error) and answer.fatal
                assert fatal or answer.seq == message.seq
        elif what == "lost":
            step(Lost(session))
        elif what == "fault":
            step(Faulted(session, "bad_frame", "garbage"))
        elif what == "open" and session not in machine.state.sessions:
            open_one(name)
        elif what == "wait":
            now += name * 1.1
            step(Tick())
        elif what == "populated":
            step(PopulatedTo(name * PAGE))
    for session in numbers_of.values():
        step(Lost(session))
    now += 1.0
    assert not any(isinstance(e, HalfClose) for e in step(Tick()))
    status = machine.status()
    names = ("sessions", "instances", "leases", "reservations", "pins", "quarantined_bytes")
    assert [status[n] for n in names] == [0] * 6
