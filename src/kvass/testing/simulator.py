"""A seeded world over the core: engines, strangers, a clock, and an arena that remembers writes.

Law of this file: a run is a function of its seed. After every event the core's own ``validate()``
and the witness's laws must hold; at the end everything drains and any namespace can still get room.

::

    python -m kvass.testing.simulator --seeds 1000 --start 0 --jobs 2
    python -m kvass.testing.simulator --replay sim-17.jsonl

A failing run prints its seed and leaves a trace (one JSON line per event the core saw), which
``--replay`` feeds to the core again, also after the simulator itself has changed.
"""

from __future__ import annotations

import argparse
import heapq
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

from kvass import messages as m
from kvass.client.parallel import ParallelStrategy
from kvass.core.effects import (
    Close,
    Effect,
    Event,
    Faulted,
    Lost,
    Opened,
    ProcessEnded,
    Received,
    Send,
    Stopping,
    Tick,
    ToSession,
    Watch,
)
from kvass.core.machine import CacheMachine, CoreConfig
from kvass.core.tier_state import FlushMode
from kvass.testing.actors import Engine, Memory, Peer, Process, some
from kvass.testing.books import Archive, BrokenLawError, Tag
from kvass.testing.layouts import random_model
from kvass.testing.mischief import do_mischief
from kvass.testing.reference import run_reference
from kvass.testing.room import prove_room
from kvass.testing.sim_tiers import SimTiers
from kvass.testing.traces import Traced, dump_trace, replay
from kvass.testing.warm import put_back_tiers, warm_tiers
from kvass.testing.witness import Witness
from kvass.types import Limits, Timing

OWN_UID = 1
"""Whose the daemon is, and the engines."""

SLICES: Final = 1000
"""Work that goes on in slices is done after so many ticks."""


class Simulation:
    """One seed. ``trace`` holds what the core of the current boot saw, and when.

    With ``validate`` off the witness judges alone, without the core's own word. ``world``: what
    every engine is spread over, instead of chance.
    """

    def __init__(
        self, seed: int, validate: bool = True, world: ParallelStrategy | None = None
    ) -> None:
        self.validate = validate
        rng = self.rng = random.Random(seed)
        self.now = 1000.0
        self.timing = Timing(lease_s=4.0, reserve_s=4.0, dma_grace_s=0.5)
        self.mischief = rng.choice([0.0, 0.02, 0.05, 0.15])
        self.stalls = rng.choice([0.0, 0.005, 0.02])
        name = rng.choice(["m{}", "m"])  # in one namespace's name, layouts alone must do
        self.models = [
            random_model(rng, name.format(i), world) for i in range(rng.choice([2, 2, 3]))
        ]
        self.roomy = rng.random() < 0.3
        rows = 5_000 if self.roomy else rng.choice([4, 5, 8, 12, 25])
        chunk_bytes = max(model.row_bytes for model in self.models)
        self.arena_bytes = rows * chunk_bytes
        parts = rng.choice([64, 32, 20])
        if self.roomy:  # a cleared set in which somebody still writes is room that nobody has
            parts = 1_000
        self.extent_bytes = None if parts == 64 else self.arena_bytes // parts
        self.engines = [
            Engine(f"e{i}", self.models[i % len(self.models)], self)
            for i in range(rng.choice([2, 3, 4]))
        ]
        chance = random.Random(f"weights {seed}")  # its own: other seeds' lives stay as they were
        if chance.random() < 0.2:
            for engine in self.engines:
                engine.trainer = chance
        crowd = sum(len(engine.processes) for engine in self.engines)
        self.crowd = rng.choice([3, 3, 3, 40])
        """How many strangers there may be."""
        self.limits = Limits(
            leases_per_instance=rng.choice([4, 1000]),
            reservations_per_instance=rng.choice([4, 1000]),
            sessions=rng.choice([max(12, crowd - 2), *(100 + 2 * crowd,) * 3]),
            sessions_per_uid=rng.choice([max(12, crowd - 2), *(100 + 2 * crowd,) * 3]),
            keys_per_message=rng.choice([8, 1000]),
            waiting_bytes=rng.choice([9_000, 30_000, 1 << 20]),
        )
        self.strangers: list[Peer] = []
        self.said: list[tuple[int, m.FromClient]] = []
        modes: list[FlushMode] = ["write_through", "write_through", "on_evict", "none"]
        self.tiers = SimTiers(self, rng.choice([0, 1, 1, 2]), rng.random() < 0.4)
        self.flush: FlushMode = "write_through"
        flush, warm = rng.choice(modes), rng.random() < 0.8
        self.retain, self.weigh = rng.random() < 0.7, rng.random() < 0.5
        self.reboots = rng.choice([0.0, 0.002, 0.01]) if self.tiers.names else 0.0
        self.clears = rng.choice([0.0, 0.01, 0.03]) if self.tiers.names else 0.0
        self.slice_slots = (1, 5, 2048)[seed % 3]
        self.archive = Archive()
        self.boots = 0
        if self.tiers.names and warm:
            self.arena_bytes = 5_000 * chunk_bytes
            self.boot()
            warm_tiers(self)
            if not self.tiers.healthy and rng.random() < 0.3:
                put_back_tiers(self)
            self.arena_bytes = rows * chunk_bytes
        self.flush = flush
        self.boot()

    # ------------------------------------------------------------ what actors see (World)

    def connect(self, uid: int = OWN_UID) -> Peer:
        self.sessions += 1
        peer = self.peers[self.sessions] = Peer(self.sessions, visible=self.rng.random() < 0.6)
        self.step(Opened(peer.session, uid, own=uid == OWN_UID))
        return peer

    def expected(self, lease: int) -> dict[int, Tag | None]:
        return self.witness.expected(lease)

    def land(self, memory: Memory, page: int, tag: Tag | None) -> None:
        if memory is self.memory and tag is not None:
            self.witness.landing(tag[1], page, self.now)
        memory.pages[page] = tag

    def straggle(self, memory: Memory, left: list[tuple[int, Tag | None]], until: float) -> None:
        for page, tag in left:
            when = self.now + self.rng.random() * (until - self.now)
            self.later(when, partial(self.land, memory, page, tag))

    def later(self, when: float, action: Callable[[], None]) -> None:
        self.laters += 1
        heapq.heappush(self.late, (when, self.laters, action))

    # ------------------------------------------------------------ the daemon

    def boot(self) -> None:
        """A daemon starts: empty books, new memory; every old session broke."""
        self.boots += 1
        boot = b"%016d" % self.boots
        self.machine = CacheMachine(
            CoreConfig(
                boot=boot,
                arena_bytes=self.arena_bytes,
                extent_bytes=self.extent_bytes,
                timing=self.timing,
                limits=self.limits,
                tiers=self.tiers.names,
                flush=self.flush,
                retain_promoted=self.retain,
                weigh_loads=self.weigh,
                slice_slots=self.slice_slots,
            )
        )
        self.witness = Witness(
            boot, self.arena_bytes, self.timing, self.limits, self.roomy, self.archive
        )
        self.witness.watch(self.tiers.names, self.retain, self.weigh)
        if self.tiers.healthy:
            self.witness.holds = self.tiers.holds
        self.tiers.boot()
        gone: Memory | None = getattr(self, "memory", None)
        self.memory = Memory(boot)
        self.peers: dict[int, Peer] = {}
        self.sessions = self.laters = 0
        self.late: list[tuple[float, int, Callable[[], None]]] = []
        self.trace: Traced = []
        self.strangers.clear()
        self.said.clear()
        for engine in self.engines:
            engine.daemon_gone(gone)

    def step(self, event: Event) -> list[Effect]:
        """One event into the core; its effects travel; every law is checked."""
        self.trace.append((self.now, event))
        effects = self.machine.step(event, self.now)
        if self.validate:
            self.machine.validate()
        self.witness.observe(event, effects, self.now)
        if len(self.trace) % 8 == 0:
            self.witness.compare(self.machine.status())
        for effect in effects:
            if isinstance(effect, Watch):
                continue
            if not isinstance(effect, ToSession):
                self.tiers.take(effect)
                continue
            peer = self.peers.get(effect.session)
            if peer is None:
                continue
            if isinstance(effect, Send):
                peer.inbox.append(effect.message)
            else:
                peer.hung_up = True
                peer.sent.clear()
                if isinstance(effect, Close):
                    del self.peers[effect.session]
        return effects

    def pass_time(self, seconds: float) -> None:
        """Let time pass; late bytes land on their way, and due ticks come, or come late."""
        until = self.now + seconds
        self.catch_up(until)
        self.now = until
        due = self.machine.next_deadline()
        if due is not None and due <= until and self.rng.random() < 0.7:
            self.step(Tick())

    def catch_up(self, until: float) -> None:
        """What was to happen by then happens."""
        while self.late and self.late[0][0] <= until:
            when, _, action = heapq.heappop(self.late)
            self.now = max(self.now, when)
            action()

    def deliver(self, peer: Peer) -> None:
        """The daemon reads the next message of a socket, or its end."""
        if not peer.sent:
            del self.peers[peer.session]
            effects = self.step(Lost(peer.session, exiting=peer.visible and peer.exits))
            if peer.visible:
                self.watch(peer, effects)
            return
        message = peer.sent.popleft()
        if message is None:
            self.step(Faulted(peer.session, "bad_frame", "garbage"))
        elif not peer.hung_up:
            self.said.append((peer.session, message))
            self.step(Received(peer.session, message))

    def watch(self, peer: Peer, effects: list[Effect]) -> None:
        """The end of a lost session's process is told if the core asked for it, and in time."""
        for effect in effects:
            if isinstance(effect, Watch) and peer.ends < effect.until:
                ended = partial(self._process_ended, effect.session)
                self.later(max(self.now, peer.ends), ended)

    def _process_ended(self, session: int) -> None:
        self.step(ProcessEnded(session))

    # ------------------------------------------------------------ chance

    def run(self, steps: int = 350) -> None:
        """A random life, the longer the wider its worlds, then quiescence."""
        self._engines_start()
        for _ in range(steps * (1 + max(model.ranks for model in self.models) // 8)):
            stall = self.rng.random() < self.stalls
            self.pass_time(self.rng.random() * 6 if stall else self.rng.expovariate(100.0))
            if self.rng.random() < self.reboots or (self.reboots and self.tiers.unsettled):
                self.boot()
            self._something()
        self._drain()
        if not self.roomy and self.rng.random() < 0.5:
            prove_room(self)

    def _engines_start(self) -> None:
        """Mostly all at once and unhindered; else they register while others work already."""
        at_once = self.rng.random() < 0.7
        for engine in self.engines:
            for process in [*engine.workers, engine.scheduler]:
                peer = engine.connect(process)
                while at_once and peer.sent:
                    self.deliver(peer)
                    engine.hear(process, peer)

    def _something(self) -> None:
        """Mischief, a message on its way in, one on its way out, a copy, or a scheduler's idea."""
        rng, engine = self.rng, self.rng.choice(self.engines)
        what = rng.random()
        if self.clears and rng.random() < self.clears and engine.scheduler.peer is not None:
            engine.scheduler.peer.ask(m.Clear())
        if what < self.mischief:
            do_mischief(self)
            return
        sent = [p for p in self.peers.values() if p.sent or p.closing]
        if what < 0.5 and sent:
            for peer in some(rng, sent):
                self.deliver(peer)
            return
        if what < 0.7 and self._hear():
            return
        busy = [w for w in engine.workers if w.jobs or w.peer is None]
        if what < 0.9 and busy:
            for worker in some(rng, busy):
                engine.work(worker)
        else:
            engine.schedule()

    def _hear(self) -> bool:
        listeners: list[tuple[Engine, Process, Peer]] = [
            (engine, process, process.peer)
            for engine in self.engines
            for process in engine.processes
            if process.peer is not None and (process.peer.inbox or process.peer.hung_up)
        ]
        for engine, process, peer in some(self.rng, listeners):
            if peer is process.peer:
                engine.hear(process, peer)
        return bool(listeners)

    # ------------------------------------------------------------ the end

    def _drain(self) -> None:
        """Law 7: clients gone and their grace over: nothing is pinned, reserved or quarantined."""
        for engine in self.engines:
            for process in engine.processes:
                engine.die(process)
        for peer in self.peers.values():
            peer.closing = True
        while self.peers:
            self.deliver(self.rng.choice(list(self.peers.values())))
        if self.rng.random() < 0.5:
            self.step(Stopping())
        at_once = 0
        while (due := self.machine.next_deadline()) is not None or self.late:
            if due is None or (self.late and self.late[0][0] <= due):
                self.catch_up(self.late[0][0])
                continue
            self.witness.quiet(due, self.machine.status())
            self.now = max(self.now, due)
            self.step(Tick())
            again = self.machine.next_deadline()
            at_once = at_once + 1 if again is not None and again <= self.now else 0
            if at_once > SLICES:
                raise BrokenLawError(f"{SLICES} ticks at {self.now} left something due at {again}")
        self.witness.quiet(None, self.machine.status())
        if self.witness.busy(self.now + self.timing.dma_grace_s):
            raise BrokenLawError("law 7: the core has forgotten what its clients may still touch")
        if self.machine.flushing:
            raise BrokenLawError("law 7: no tier has anything to do, yet the core awaits it")
        self.witness.settled(self.machine.status(), self.flush == "write_through")
        self.pass_time(self.timing.dma_grace_s)


# ---------------------------------------------------------------- running


def run_seed(
    seed: int,
    steps: int = 350,
    trace_to: Path | None = None,
    look: Callable[[Simulation], None] = lambda sim: None,
) -> str | None:
    """Run one seed, and let ``look`` see its end; ``None``, or what went wrong and where its trace
    lies."""
    sim: Simulation | None = None
    try:
        sim = Simulation(seed)
        sim.run(steps)
        look(sim)
        run_reference(seed)
    except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to this seed
        told = "".join(traceback.format_exception(error, limit=-6))
        last = [] if sim is None else [f"{t:.4f} {e}" for t, e in sim.trace[-12:]]
        if sim is not None and trace_to is not None:
            path = trace_to / f"sim-{seed}.jsonl"
            path.write_text(
                "\n".join(dump_trace(sim.machine.state.config, sim.roomy, sim.trace)) + "\n"
            )
            last.append(f"replay: python -m kvass.testing.simulator --replay {path}")
        return "\n".join([f"seed {seed} failed: {type(error).__name__}: {error}", told, *last])
    return None


def main(argv: list[str] | None = None) -> int:
    """Run seeds, or replay a trace; 1 if any broke a law."""
    parser = argparse.ArgumentParser(prog="python -m kvass.testing.simulator")
    parser.add_argument("--seeds", type=int, default=1000, help="how many to run")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", type=int, default=350, help="how long each life is")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--traces", type=Path, default=Path("."), help="where traces are left")
    parser.add_argument("--replay", type=Path, help="a trace to feed to the core again")
    args = parser.parse_args(argv)
    if args.replay is not None:
        replay(args.replay.read_text().splitlines())
        print(f"{args.replay}: no law is broken any more")  # noqa: T201
        return 0
    began, failed = time.perf_counter(), 0
    seeds = range(args.start, args.start + args.seeds)
    one = partial(run_seed, steps=args.steps, trace_to=args.traces)
    with ProcessPoolExecutor(max_workers=args.jobs) as pool:
        for told in pool.map(one, seeds, chunksize=10):
            if told is not None:
                failed += 1
                print(told, file=sys.stderr)  # noqa: T201
    rate = args.seeds / (time.perf_counter() - began) * 60
    print(f"{args.seeds} seeds from {args.start}: {failed} failed, {rate:.0f} a minute")  # noqa: T201
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
