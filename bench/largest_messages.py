"""``python -m bench.largest_messages``: what the largest legal message of every kind costs the
daemon's thread: to decode it, to carry it out, to encode its answers, and the longest slice of what
goes on behind it. In processor time, with the garbage collector set as the daemon sets it.

The bar is 10 ms for each. ``docs/laws.md`` has the limits (law 12).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.ma

from bench.core_time import ARENA_BYTES, TOUCHED, Core, Model
from kvass import messages as m
from kvass.core.clients.lookup_log import ENGINES, ENTRIES, LookupEntry
from kvass.core.clients.registry import Instance
from kvass.core.effects import Lost, Opened, Received, Send
from kvass.core.handlers.admission import GROUPS
from kvass.core.rows.removed import AT_ONCE
from kvass.daemon.loop import GC_THRESHOLD
from kvass.types import MAX_GROUPS, MAX_RANKS, SCHEDULER, GroupLayout, Limits, Quota, RankLayout
from kvass.wire import framing

LIMITS: Final = Limits()
CHUNK_TOKENS: Final = 256
Case = tuple[str, int, m.FromClient]


def layout(groups: int, layers: int, width: int = 0) -> RankLayout:
    """So many groups, of so many layers each, whose names have so many characters."""
    names = tuple(f"{i:0{width}d}" for i in range(layers))
    return RankLayout((GroupLayout("full", 16, names, (1,) * layers),) * groups)


def identity(mark: object) -> dict[str, str]:
    """As large as may be; different for each ``mark`` in every field."""
    size = LIMITS.identity_bytes // LIMITS.identity_fields - 6
    return {f"{i:05d}": str(mark).ljust(size)[:size] for i in range(LIMITS.identity_fields)}


def terms(instance: str, rank: int = 0, **fields: Any) -> m.Register:
    """A registration; of a rank with the smallest layout, if none is given."""
    small = None if rank == SCHEDULER else layout(1, 1)
    good = {"identity": {}, "chunk_tokens": CHUNK_TOKENS, "layout": small}
    return m.Register(**{"seq": 2, "instance": instance, "rank": rank, **good, **fields})


def registrations(core: Core) -> Iterator[Case]:
    """The largest of one rank, with fields unlike those of others, and each of many ranks."""
    most = MAX_GROUPS, LIMITS.layers // MAX_GROUPS
    yield "register: of all groups", core.connect(), terms("a", layout=layout(*most))
    yield "register: one group", core.connect(), terms("b", layout=layout(1, LIMITS.layers))
    long = layout(1, LIMITS.layers, LIMITS.register_bytes // LIMITS.layers - 9)
    yield "register: long names", core.connect(), terms("c", layout=long)
    refused = layout(MAX_GROUPS, 1700)
    yield "register: too many layers", core.connect(), terms("d", layout=refused)
    for i in range(18):
        said = terms(f"i{i}", identity=identity(i), model="m")
        yield "register: a new identity", core.connect(), said
    for kind, world in (("a shard each", MAX_RANKS), ("one shard", 1)):
        many = {"ranks": MAX_RANKS, "world_size": world, "identity": identity(kind)}
        for rank in range(MAX_RANKS):
            shard = {"shard": rank if world > 1 else 0, "writer": world > 1 or rank == 0}
            said = terms(kind, rank, layout=layout(*most), **shard, **many)
            yield f"register: rank of {MAX_RANKS}, {kind}", core.connect(), said
        scheduler = core.connect()
        said = terms(kind, SCHEDULER, **many)
        yield f"register: scheduler of {MAX_RANKS}, {kind}", scheduler, said
        said = terms(kind, SCHEDULER, generation=b"g" * 64, **many)
        yield f"register: another generation, {kind}", scheduler, said


def status_of_many(core: Core) -> Iterator[Case]:
    """Of as many engines and layer groups as may be; of most engines, ranks are missing."""
    for i in range(LIMITS.namespaces - len(core.machine.state.namespaces)):
        other = Model(core, f"{'y' * 250}{i}", groups=GROUPS)
        other.quit()
    connections = list[int]()
    for i in range(LIMITS.sessions - len(core.machine.state.connections) - 2):
        connections.append(next(core.connections))
        core.step(Opened(connections[-1], uid=1000 + i // LIMITS.sessions_per_uid))
        core.ask(connections[-1], m.Hello(seq=1, clock_s=core.now))
        said = terms(f"{'x' * 500}{i}", ranks=MAX_RANKS, identity={"model": "n" * 256})
        core.ask(connections[-1], said)
    looking = core.connect()
    yield "status: many engines", looking, m.Status(seq=3)
    for connection in connections:
        core.step(Lost(connection))
    core.go_on()


def requests(core: Core) -> Iterator[Case]:
    """All that a scheduler asks, with everything that can be in a message."""
    model = Model(core, "requests")
    stored = [model.store(512) for _ in range(128)]
    keys, width = b"".join(stored), 32
    said: dict[str, Any] = {"seq": 4, "request": "r" * 512, "width": width}
    yield "lookup: hits", model.scheduler, m.Lookup(digests=keys[: 1 << 20], **said)
    every = LIMITS.keys_per_message
    absent = core.fresh(every)
    more: dict[str, Any] = {"blocks": absent[: 15 * width], "first_blocks": absent[: 15 * width]}
    looked = m.Lookup(digests=absent, tenant="t", writing=True, **more, **said)
    yield "lookup: misses", model.scheduler, looked
    yield "prefetch", model.scheduler, m.Prefetch(digests=keys[: 1 << 20], **said)
    small = [m.ReserveItem("r" * 512, core.fresh(32)) for _ in range(1024)]
    yield "reserve: many items", model.scheduler, m.Reserve(seq=4, items=small)
    chunks = LIMITS.keys_per_message // 16 - 1
    blocks = core.fresh(16 * chunks + 15)
    large = [m.ReserveItem("r", core.fresh(chunks), tenant="t", blocks=blocks)]
    yield "reserve: one item with blocks", model.scheduler, m.Reserve(seq=4, items=large)
    core.pass_time()
    held = [model.look_up(keys[i * 320 : (i + 1) * 320]) for i in range(4096)]
    grants = [model.reserve(core.fresh(1)).grants[0].reservation for _ in range(4096)]
    leases = tuple(one.lease for one in held)
    handed = m.HandedOver(boot=bytes(16), leases=leases, reservations=tuple(grants))
    yield "handed over", model.scheduler, handed
    yield "handed over again", model.scheduler, handed
    core.pass_time()
    large_lease = model.look_up(keys[: 1 << 20]).lease
    yield "release", model.scheduler, m.Release(boot=bytes(16), lease=large_lease)
    yield "removals", model.scheduler, m.Removals(seq=4, present=(keys[: AT_ONCE * width],))
    why, detail = "w" * 4096, "d" * 4096
    notes = tuple(m.LookupNote(f"{n:0512}", why, detail=detail) for n in range(m.MOST_NOTES))
    yield "lookup notes", model.scheduler, m.LookupNotes(boot=bytes(16), notes=notes)
    n = LIMITS.segment_chunks
    for name, tokens in (
        ("alike", bytes(4 * CHUNK_TOKENS * n)),
        ("new", np.arange(CHUNK_TOKENS * n, dtype="<u4").tobytes()),
    ):
        indexed = m.IndexChunks(seq=4, space=b"s" * 32, digests=keys[: n * width], tokens=tokens)
        yield f"index chunks: {name}", model.scheduler, indexed
        yield f"index chunks: {name}, again", model.scheduler, indexed
    found = m.FindSegments(seq=4, space=b"s" * 32, tokens=bytes(4 * LIMITS.segment_tokens))
    yield "find segments: all alike", model.scheduler, found
    yield "clear", model.scheduler, m.Clear(seq=5)


def others(core: Core) -> Iterator[Case]:
    """What any connection may say."""
    new = next(core.connections)
    core.step(Opened(new, own=True))
    names = tuple("x" * 300 + str(i) for i in range(200))
    yield "hello", new, m.Hello(seq=1, clock_s=core.now, features=names)
    yield "ping", new, m.Ping(seq=2)
    for i in range(ENGINES):
        log = core.machine.state.log.of(Instance(f"{i}", terms(f"{i}")))
        for number in range(ENTRIES):
            log.add(LookupEntry(f"{number:0512}", core.now, detail="d" * 512))
    yield "explain: one request", new, m.Explain(seq=2, request="r", limit=m.MOST_EXPLAINED)
    yield "explain: all", new, m.Explain(seq=2, limit=m.MOST_EXPLAINED)
    yield "set quota", new, m.SetQuota(seq=2, quota=Quota("t", 1 << 40, 1 << 30))
    yield "empty tier", new, m.EmptyTier(seq=2, tier="x" * 4096)
    yield "clear everything", new, m.Clear(seq=2, everything=True)


def measure() -> dict[str, list[float]]:
    """By case, the worst ms of decoding, carrying out, encoding the answers, and a slice behind."""
    np.ones(TOUCHED, np.uint8)  # as in bench.core_time
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLD)
    figures = dict[str, list[float]]()
    core = Core(ARENA_BYTES, LIMITS.namespaces)
    for cases in (registrations, requests, others, status_of_many):
        for name, connection, message in cases(core):
            worst = figures.setdefault(name, [0.0] * 4)
            worst[:] = map(max, worst, cost(core, connection, message))
    return figures


def cost(core: Core, connection: int, message: m.FromClient) -> list[float]:
    """Of one message, as in ``measure``."""
    frame, decoder = framing.encode(message), framing.from_clients()
    began_s = time.process_time()
    (said,) = decoder.feed(frame)
    decoded_s = time.process_time()
    effects = core.machine.step(Received(connection, said), core.now)
    done_s = time.process_time()
    answers = [framing.encode(effect.message) for effect in effects if isinstance(effect, Send)]
    encoded_s = time.process_time()
    core.slowest, _ = 0.0, answers
    core.go_on()
    ends_s = (decoded_s - began_s, done_s - decoded_s, encoded_s - done_s, core.slowest)
    return [seconds * 1e3 for seconds in ends_s]


def main() -> None:
    """Print a table."""
    print(f"{'ms':45} decode   step encode behind")
    for name, worst in measure().items():
        print(f"{name:45}" + " ".join(f"{ms:6.2f}" for ms in worst))


if __name__ == "__main__":
    main()
