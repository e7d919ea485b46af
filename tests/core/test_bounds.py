"""Every number, text and list that a client can send is bounded, and no bound's edge hurts.

The fields are found by looking at the message types, so a new field is covered at once.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from typing import Any, Final, get_args

import msgspec
import pytest
from msgspec import inspect

from kvass import messages as m
from kvass.core.effects import Event, Faulted, Received, Send
from kvass.errors import FrameError
from kvass.types import MAX_GROUPS, PAGE, GroupLayout, Quota, RankLayout
from kvass.wire import framing
from tests.core.rig import BOOT, GRACE_S, WIDTH, Engine, Rig, digests
from tests.support.simulation.random_messages import any_message
from tests.support.simulation.random_models import random_model

INTEGERS: Final = (
    *(0, -1, 1, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53),
    *(2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
)
FLOATS: Final = (
    *(0.0, -0.0, -1.0, 5e-324, 1e12, 1e308, -1e308),
    *(math.inf, -math.inf, math.nan, 2**63, -(2**63), 2**64 - 1),
)
KINDS: Final[tuple[type[m.FromClient], ...]] = get_args(m.FromClient)
HYBRID: Final = RankLayout(
    (
        GroupLayout("sliding_window", 16, ("a",), (PAGE,), 20),
        GroupLayout("chunked_local", 16, ("b",), (PAGE,), 24),
        GroupLayout("state", 16, ("c",), (PAGE,)),
    )
)
FULL: Final = RankLayout((GroupLayout("full", 16, ("a",), (PAGE,)),))


def unbounded(kind: inspect.Type, path: str) -> Iterator[str]:
    """The places below ``path`` that anything fits in."""
    match kind:
        case inspect.IntType() | inspect.FloatType():
            if kind.ge is None or kind.le is None:
                yield path
        case inspect.StrType() | inspect.BytesType():
            if kind.max_length is None:
                yield path
        case inspect.VarTupleType() | inspect.ListType():
            if kind.max_length is None:
                yield path
            yield from unbounded(kind.item_type, f"{path}[]")
        case inspect.DictType():
            if kind.max_length is None:
                yield path
            yield from unbounded(kind.key_type, f"{path}{{}}")
            yield from unbounded(kind.value_type, f"{path}{{}}")
        case inspect.StructType():
            for field in kind.fields:
                yield from unbounded(field.type, f"{path}.{field.name}")
        case inspect.UnionType():
            for one in kind.types:
                yield from unbounded(one, path)
        case _:
            assert isinstance(kind, inspect.BoolType | inspect.NoneType | inspect.LiteralType), kind


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_every_field_of_a_client_is_bounded(kind: type) -> None:
    assert [*unbounded(inspect.type_info(kind), kind.__name__)] == []


def test_a_field_without_bounds_is_seen() -> None:
    found = [*unbounded(inspect.type_info(m.Welcome), "Welcome")]
    assert {"Welcome.boot", "Welcome.arena_bytes", "Welcome.limits.frame_bytes"} <= {*found}


IDENTITIES: Final = {
    *("seq", "lease", "reservation", "leases[]", "reservations[]", "since"),
    *("items[].groups", "groups"),  # bit masks
    *("quota.cap_bytes", "quota.reserved_bytes"),  # of the daemon's own user
}
"""Integers that no two clients can add up, so that all of 64 bits may be used."""


def large_integers(kind: inspect.Type, path: str = "") -> Iterator[str]:
    """The integers below ``path`` of which a thousand may not fit 63 bits together."""
    match kind:
        case inspect.IntType():
            if not -(1 << 53) <= (kind.ge or 0) <= (kind.le or 0) <= 1 << 53:
                yield path
        case inspect.VarTupleType() | inspect.ListType():
            yield from large_integers(kind.item_type, f"{path}[]")
        case inspect.StructType():
            for field in kind.fields:
                yield from large_integers(field.type, f"{path}.{field.name}".lstrip("."))
        case inspect.UnionType():
            for one in kind.types:
                yield from large_integers(one, path)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_what_clients_count_can_be_added_up(kind: type) -> None:
    assert {*large_integers(inspect.type_info(kind))} <= IDENTITIES


def test_a_status_has_the_sum_of_what_engines_say_at_most() -> None:
    rig = Rig(pages=64, extent=4)
    bounds: Any = inspect.type_info(m.Register)
    (most,) = (f.type.le for f in bounds.fields if f.name == "cache_bytes")
    for name in ("a", "b", "c"):
        rig.register(rig.open(), name, rank=0, layout=FULL, cache_bytes=most)
    count = 1 << 53
    group = m.ShadowGroup(count, count, count, 1.0, 1.0, count)
    report = m.ShadowReport(boot=BOOT, load_bytes=count, groups=(group,) * MAX_GROUPS)
    assert rig.say(rig.engine("d").scheduler, report) == []
    status = rig.status
    assert status["engine_cache_bytes"] == 3 * most
    msgspec.msgpack.encode(status)  # no sum has more than 64 bits


def odd_values(kind: inspect.Type, value: Any) -> Iterator[Any]:
    """``value`` with one number in it, each in turn, at each edge."""
    match kind:
        case inspect.IntType():
            yield from INTEGERS
        case inspect.FloatType():
            yield from FLOATS
        case inspect.VarTupleType() | inspect.ListType() if value:
            for i, one in enumerate(value):
                for odd in odd_values(kind.item_type, one):
                    yield [*value[:i], odd, *value[i + 1 :]]
        case inspect.StructType():
            for field in kind.fields:
                for odd in odd_values(field.type, value[field.name]):
                    yield {**value, field.name: odd}
        case inspect.UnionType() if value is not None:
            for one in kind.types:
                yield from odd_values(one, value)


def numbers(kind: inspect.Type) -> int:
    """How many numeric fields there are."""
    match kind:
        case inspect.IntType() | inspect.FloatType():
            return 1
        case inspect.VarTupleType() | inspect.ListType():
            return numbers(kind.item_type)
        case inspect.StructType():
            return sum(numbers(field.type) for field in kind.fields)
        case inspect.UnionType():
            return sum(map(numbers, kind.types))
    return 0


def plain(value: Any) -> Any:
    """As maps and lists, every field named."""
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    return [plain(one) for one in value] if isinstance(value, tuple | list) else value


def heard(connection: int, frame: bytes) -> Event:
    """What the daemon makes of a frame; one that is refused names the field."""
    try:
        (message,) = framing.from_clients().feed(frame)
    except FrameError as fault:
        code, text = fault.code, str(fault)
    else:
        return Received(connection, message)
    assert code == "bad_message"
    assert re.search(r"Expected .* at `\$\.\w+", text), text
    return Faulted(connection, code, text)


class World:
    """An engine that stored and holds things, and a bystander who must always be served."""

    def __init__(self) -> None:
        self.rig = Rig(pages=256, extent=4, sessions=1 << 20, namespaces=1 << 20)
        self.bystander = self.rig.engine("bystander", identity={"model": "other"})
        self.engine = self.rig.engine("e", layout=HYBRID)
        self.engine.store("a", "b", groups=7)
        self.lease = int(self.engine.lookup("a", "b").lease)
        self.reservation = int(self.engine.reserve("a", "b", "c", "d", groups=7).reservation)
        assert self.lease
        assert self.reservation
        self.registered = 0

    def examples(self) -> list[m.FromClient]:
        """One good value of every message, with every field set."""
        blob = digests("a", "b", "c")
        boot: dict[str, Any] = {"boot": BOOT}
        item = m.ReserveItem(request="r", digests=blob, first=1, groups=7)
        terms: dict[str, Any] = {"identity": {"model": "n"}, "chunk_tokens": 48, "seq": 3}
        return [
            m.Hello(seq=1, clock_s=self.rig.now),
            *(m.Register(instance="new", rank=0, layout=one, **terms) for one in (FULL, HYBRID)),
            m.Lookup(seq=3, request="r", digests=blob, width=WIDTH, readers=(0,)),
            m.Prefetch(seq=3, request="r", digests=blob, width=WIDTH),
            m.IndexChunks(seq=3, space=b"s", digests=blob, tokens=bytes(4 * 48), width=WIDTH),
            m.FindSegments(seq=3, space=b"s", tokens=bytes(4 * 48), width=WIDTH),
            m.Reserve(seq=3, items=[item, item], width=WIDTH),
            m.HandedOver(
                leases=(self.lease,),
                reservations=(self.reservation,),
                results=(m.LookupResult(request="r", tiers=(16,)),),
                **boot,
            ),
            m.Release(lease=self.lease, **boot),
            m.Release(lease=self.lease, rank=0, **boot),
            m.Abort(reservation=self.reservation, rank=0, **boot),
            m.Commit(reservation=self.reservation, rank=0, **boot),
            m.ShadowReport(lookups=1, groups=(m.ShadowGroup(rows=1),), **boot),
            m.Drained(**boot),
            m.Removals(seq=3, since=1, width=WIDTH, present=(blob, blob, blob)),
            m.Present(seq=3, width=WIDTH, digests=blob, tiers=True, groups=7),
            m.Ping(seq=3),
            m.Status(seq=3),
            m.LookupNotes(notes=(m.LookupNote(request="r", why="no_daemon"),), **boot),
            m.Explain(seq=3),
            m.Clear(seq=3),
            m.SetQuota(seq=3, quota=Quota("t", 5, 1)),
            m.ClearTenant(seq=3, tenant="t"),
            m.EmptyTier(seq=3, tier="t"),
            m.EndSession(seq=3, session=7, tenant="t"),
            m.AskSession(seq=3, session=7, tenant="t"),
        ]

    def say(self, connection: int, kind: type, fields: dict[str, Any]) -> list[Any]:
        """What comes back to ``connection``."""
        payload = {"t": kind.__struct_config__.tag, **fields}  # type: ignore[attr-defined]
        frame = framing.frame(msgspec.msgpack.encode(payload))
        effects = self.rig.step(heard(connection, frame))
        return [e.message for e in effects if isinstance(e, Send) and e.connection == connection]

    def register(self, fields: dict[str, Any]) -> None:
        """As a new engine; if it is admitted, it looks up and stores."""
        rig = self.rig
        self.registered += 1
        name = {"instance": f"new{self.registered}"}
        worker, scheduler = rig.open(), rig.open()
        (reply, *_) = self.say(worker, m.Register, {**fields, **name})
        if isinstance(reply, m.Registered) and not reply.missing:
            self.say(scheduler, m.Register, {**fields, **name, "rank": -1, "layout": None})
            one = Engine(rig, scheduler, [worker], reply.namespace)
            one.lookup("a", "b", "c")
            one.reserve("a", "b", "c", groups=(1 << len(fields["layout"]["groups"])) - 1)
            one.lookup("a", "b", "c", first=1)
        rig.lose(*(s for s in (worker, scheduler) if s in rig.machine.state.connections))
        rig.wait(GRACE_S)


def session_of(world: World, state: str, message: m.FromClient) -> int:
    """Who says it: a connection that is new, that only greeted, or the engine's own."""
    if state != "registered":
        return world.rig.open(hello=state == "greeted")
    rank = getattr(message, "rank", -1)
    return world.engine.scheduler if rank < 0 else world.engine.workers[rank]


@pytest.mark.parametrize("state", ["fresh", "greeted", "registered"])
def test_no_boundary_value_hurts_anybody(state: str) -> None:
    world = World()
    said: set[type] = set()
    for number, message in enumerate(world.examples()):
        kind = type(message)
        said.add(kind)
        for fields in odd_values(inspect.type_info(kind), plain(message)):
            connection = session_of(world, state, message)
            if connection not in world.rig.machine.state.connections:
                world = World()
                connection = session_of(world, state, message)
            if kind is m.Register and state == "greeted":
                world.register(fields)
            else:
                world.say(connection, kind, fields)
            if state != "registered":
                world.rig.lose(connection)
        world.bystander.store(number)
        assert world.bystander.holds(number) == 1, "another instance is not served any more"
    assert said == {*KINDS}


def test_the_examples_reach_every_number() -> None:
    """``odd_values`` sees as many fields as the message types have."""
    reached = dict[type, int]()
    for message in World().examples():
        kind = inspect.type_info(type(message))
        values = [*odd_values(kind, plain(message))]
        floats = sum(isinstance(f.type, inspect.FloatType) for f in kind.fields)  # type: ignore[attr-defined]
        found = (len(values) - floats * len(FLOATS)) // len(INTEGERS) + floats
        reached[type(message)] = max(found, reached.get(type(message), 0))
    counted = {kind: numbers(inspect.type_info(kind)) for kind in KINDS}
    short = {k.__name__ for k in KINDS if reached[k] < counted[k] and k is not m.Register}
    assert not short
    assert reached[m.Register] >= counted[m.Register] + 2 * 3, "each of three groups"


def test_everything_a_stranger_of_the_simulator_says_decodes() -> None:
    rng = random.Random(0)
    models = [random_model(rng, "m")]
    for seq in range(1, 2000):
        message = any_message(rng, BOOT, models, seq)
        assert [*framing.from_clients().feed(framing.encode(message))] == [message]


def test_the_joined_name_of_many_layers_is_within_bounds() -> None:
    name = "+".join(
        f"language_model.model.layers.{i}.self_attn.attn@1234567890abcdef" for i in range(128)
    )
    group = GroupLayout("full", 16, (name,), (4096,))
    said = m.Register("e", {}, 256, rank=0, layout=RankLayout((group,)))
    (heard,) = framing.from_clients().feed(framing.encode(said))
    assert heard == said
