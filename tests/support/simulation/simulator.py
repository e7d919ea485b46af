"""Random histories of a simulated world: the core under crashes, stalls, faults and restarts.

A run is a function of its seed. At the end all clients leave, everything the core holds must end,
and any namespace must still get room.

::

    python -m tests.support.simulation.simulator --seeds 1000 --start 0 --jobs 2
    python -m tests.support.simulation.simulator --replay sim-17.jsonl

A failing run prints its seed and writes a trace: one JSON line per event the core saw. ``--replay``
feeds a trace to the core again, also after the simulator itself has changed; or the file in which a
daemon whose core has failed left its last events. If that lacks the first ones, less may happen.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from kvass import messages as m
from kvass.core.effects import Stopping, Tick
from kvass.core.event_lines import line, parse
from kvass.core.machine import CacheMachine, CoreConfig
from tests.support.reference.engine import run_reference
from tests.support.simulation.clients import ClientConnection, Process, SimulatedEngine, some
from tests.support.simulation.earlier_daemon import fill_tiers, put_back_tiers
from tests.support.simulation.faults import inject_fault
from tests.support.simulation.starvation import check_no_starvation
from tests.support.simulation.world import World
from tests.support.witness.records import BrokenLawError
from tests.support.witness.witness import Witness

SLICES: Final = 1000
"""Ticks after which work that the core does in slices must be over."""


class Simulation(World):
    """A world and its history."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        if self.tiers.names and self.filled:
            self._fill_tiers()
        self.boot()

    def _fill_tiers(self) -> None:
        """An earlier daemon, with a large arena and ``write_through``, fills the tiers."""
        flush, self.flush = self.flush, "write_through"
        arena_bytes, self.arena_bytes = self.arena_bytes, 5_000 * self.chunk_bytes
        self.boot()
        fill_tiers(self)
        if not self.tiers.healthy and self.rng.random() < 0.3:
            put_back_tiers(self)
        self.flush, self.arena_bytes = flush, arena_bytes

    def run(self, steps: int = 350) -> None:
        """A random history, longer for engines of many ranks; then everything ends."""
        self._engines_start()
        for _ in range(steps * (1 + max(model.ranks for model in self.models) // 8)):
            stall = self.rng.random() < self.stalls
            self.pass_time(self.rng.random() * 6 if stall else self.rng.expovariate(100.0))
            if self.rng.random() < self.reboots or (self.reboots and self.tiers.unsettled):
                self.boot()
            self._something()
        self._drain()
        if not self.roomy and self.rng.random() < 0.5:
            self.quotas.end(self)
            check_no_starvation(self)

    def _engines_start(self) -> None:
        """Mostly all register before anything else; else some register while others work."""
        at_once = self.rng.random() < 0.7
        for engine in self.engines:
            for process in [*engine.workers, engine.scheduler]:
                peer = engine.connect(process)
                while at_once and peer.sent:
                    self.deliver(peer)
                    engine.hear(process, peer)

    def _something(self) -> None:
        """One of: a fault, a message read by the daemon or by a client, a copy, a request."""
        rng, engine = self.rng, self.rng.choice(self.engines)
        self.quotas.change(self)
        self.quotas.clear(self)
        self.tiers.change()
        what = rng.random()
        if self.clears and rng.random() < self.clears and engine.scheduler.peer is not None:
            engine.scheduler.peer.ask(m.Clear())
        if what < self.mischief:
            inject_fault(self)
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
        listeners: list[tuple[SimulatedEngine, Process, ClientConnection]] = [
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
        """Law 7: after all clients have gone and their grace has passed, nothing is held."""
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
            self.witness.state.quiet(due, self.machine.status())
            self.now = max(self.now, due)
            self.step(Tick())
            again = self.machine.next_deadline()
            at_once = at_once + 1 if again is not None and again <= self.now else 0
            if at_once > SLICES:
                raise BrokenLawError(f"{SLICES} ticks at {self.now} left something due at {again}")
        self.witness.state.quiet(None, self.machine.status())
        if self.witness.state.busy(self.now + self.timing.lost_engine_grace_s):
            raise BrokenLawError("law 7: the core forgot pages that clients may still touch")
        if self.machine.flushing:
            raise BrokenLawError("law 7: the core waits for tiers that have nothing to do")
        self.witness.settled(self.machine.status(), self.flush == "write_through")
        self.pass_time(self.timing.lost_engine_grace_s)


# ---------------------------------------------------------------- running


def run_seed(
    seed: int,
    trace_to: Path | None = None,
    look: Callable[[Simulation], None] = lambda sim: None,
) -> str | None:
    """Run one seed, and let ``look`` see its end: ``None``, or a text that says what failed and
    where its trace is."""
    sim: Simulation | None = None
    try:
        sim = Simulation(seed)
        sim.run()
        look(sim)
        run_reference(seed)
    except Exception as error:  # noqa: BLE001 - the report names the seed
        told = "".join(traceback.format_exception(error, limit=-6))
        last = [] if sim is None else [f"{t:.4f} {e}" for t, e in sim.trace[-12:]]
        if sim is not None and trace_to is not None:
            path = trace_to / f"sim-{seed}.jsonl"
            path.write_text(dump_trace(sim))
            last.append(f"replay: python -m tests.support.simulation.simulator --replay {path}")
        return "\n".join([f"seed {seed} failed: {type(error).__name__}: {error}", told, *last])
    return None


# ---------------------------------------------------------------- traces


def dump_trace(sim: Simulation) -> str:
    """A line ``{"config": .., "roomy": ..}``, then a line per event (``core/event_lines.py``)."""
    config = msgspec.to_builtins(sim.machine.state.config)
    lines = [line(now, event, max_chars=None) for now, event in sim.trace]
    return "\n".join([json.dumps({"config": config, "roomy": sim.roomy}), *lines, ""])


def replay(lines: list[str]) -> None:
    """Feed a trace to the core and a witness again.

    Raises:
        AssertionError: the law that the recorded run broke, if it still does; of a daemon's
            events whatever the core raised.
    """
    head = json.loads(lines[0])
    config = msgspec.convert(head["config"], CoreConfig)
    machine = CacheMachine(config)
    if "dropped" in head:  # a daemon's: nobody knows what its clients had before
        for text in lines[1:]:
            now, event = parse(text)
            machine.step(event, now)
        return
    witness = Witness(config, roomy=head["roomy"])
    for text in lines[1:]:
        now, event = parse(text)
        effects = machine.step(event, now)
        machine.validate()
        witness.observe(event, effects, now, machine.next_deadline())
        witness.state.compare(machine.status())
    if not witness.connections.connections and not witness.state.ops:
        witness.state.quiet(machine.next_deadline(), machine.status())


def main(argv: list[str] | None = None) -> int:
    """Run seeds, or replay a trace. The exit status is 1 if any seed failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.simulation.simulator")
    parser.add_argument("--seeds", type=int, default=1000, help="how many to run")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
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
    one = partial(run_seed, trace_to=args.traces)
    with ProcessPoolExecutor(args.jobs) as pool:
        for told in pool.map(one, seeds, chunksize=10) if args.jobs > 1 else map(one, seeds):
            if told is not None:
                failed += 1
                print(told, file=sys.stderr)  # noqa: T201
    rate = args.seeds / (time.perf_counter() - began) * 60
    print(f"{args.seeds} seeds from {args.start}: {failed} failed, {rate:.0f} a minute")  # noqa: T201
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
