"""A fleet on paper: machines with a daemon each and one shared store, and who sends requests where.

``python -m bench.fleet`` plays a made-up trace of agents through as many cores of kvass as there
are machines (``kvass.simulate``). Each machine computes prompts one after another, as fast as
``--prefill-tokens-s`` says, and loads from the store as fast as ``--l2-speed`` says. It takes time,
but no memory, and no engine. It prints a table with one line for each speed of the store and each
router, or ``--json``.

The routers:

- ``in turns``: each request goes to the next machine (round robin).
- ``least busy``: to the machine that is free first.
- ``remembers``: to the machine at which the request would end first, if each machine still had all
  that was ever sent there. So do routers that build a tree from the requests that they sent.
- ``knows L1``: the same, with what each machine has in L1 now. KV events tell routers this.
- ``knows tiers``: the same, and what L1 lacks and the store has counts, too, by what a load saves.
  KV events tell routers this with ``kvass.tier_events``.

What is printed:

- ``computed``: the share of all prompt tokens that was computed. ``from L1`` and ``from store``:
  the shares that were found there.
- ``first token``: from the request's arrival on: the queue of its machine, the store, and computing
  what was not found. Median, and the 99th percentile.
- ``read``, ``written``: bytes that the store gives and takes in a second, for the whole fleet; for
  one machine divide by their number. ``gets/s``: the records among them (one per chunk).
- ``busiest``: the work of the machine that computed and waited most, against the mean.

What it leaves out: the engines' own caches, decoding, and a limit of the store as a whole.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvass.simulate.models import layers_of, layout
from kvass.simulate.player import Model, Player, Setting
from kvass.simulate.synth import KINDS, write
from kvass.simulate.tier import SimulatedStore
from kvass.simulate.traces import Trace, TraceRequest, read
from kvass.types import Size

BLOCK_TOKENS: Final = 16


@dataclass
class Machine:
    """A daemon, and an engine that computes one prompt after another. ``free_s``: when it has done
    all that it was sent. ``work_s``: how long it has computed and waited for the store."""

    player: Player
    free_s: float = 0.0
    work_s: float = 0.0


@dataclass
class Fleet:
    """Machines with one store. ``seen``: by machine the pieces of all prompts that it was sent."""

    trace: Trace
    model: Model
    machines: list[Machine]
    seen: list[set[int]] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)

    def ask(self, number: int, request: TraceRequest) -> None:
        """Send a request to machine ``number``."""
        machine, outcome = self.machines[number], self.machines[number].player.outcome
        begin_s = max(machine.free_s, self.arrival_s(request))
        waited_s, hit = outcome.waited_s, outcome.hit_tokens
        machine.player.ask(self.trace, request)
        waited_s = outcome.waited_s - waited_s
        tokens = request.input_tokens - (outcome.hit_tokens - hit)
        work_s = waited_s + tokens / outcome.setting.prefill_tokens_s
        machine.free_s = begin_s + work_s
        machine.work_s += work_s
        self.seen[number].update(request.pieces.tolist())
        self.first_token_s.append(machine.free_s - self.arrival_s(request))

    def arrival_s(self, request: TraceRequest) -> float:
        return request.time_s - self.trace.requests[0].time_s

    def soonest(self, request: TraceRequest, held: Sequence[float]) -> int:
        """The machine at which it would end first, if machine i has ``held[i]`` tokens of it."""
        speed, now = self.machines[0].player.setting.prefill_tokens_s, self.arrival_s(request)
        ends = [
            max(machine.free_s, now) + (request.input_tokens - tokens) / speed
            for machine, tokens in zip(self.machines, held, strict=True)
        ]
        return ends.index(min(ends))


def in_turns(fleet: Fleet) -> Callable[[TraceRequest], int]:
    turn = count()
    return lambda request: next(turn) % len(fleet.machines)


def least_busy(fleet: Fleet) -> Callable[[TraceRequest], int]:
    nothing = [0.0] * len(fleet.machines)
    return lambda request: fleet.soonest(request, nothing)


def remembers(fleet: Fleet) -> Callable[[TraceRequest], int]:
    def choose(request: TraceRequest) -> int:
        pieces, each = request.pieces.tolist(), fleet.trace.piece_tokens
        held = []
        for seen in fleet.seen:
            found = next((i for i, piece in enumerate(pieces) if piece not in seen), len(pieces))
            held.append(found * each)
        return fleet.soonest(request, held)

    return choose


def knows_l1(fleet: Fleet) -> Callable[[TraceRequest], int]:
    chunk = fleet.machines[0].player.setting.chunk_tokens

    def choose(request: TraceRequest) -> int:
        players = [machine.player for machine in fleet.machines]
        held = [player.held_chunks(fleet.trace, request) * chunk for player in players]
        return fleet.soonest(request, held)

    return choose


def knows_tiers(fleet: Fleet) -> Callable[[TraceRequest], int]:
    setting = fleet.machines[0].player.setting
    load_s = fleet.model.row_bytes / setting.l2_bytes_s
    saved = max(0.0, 1 - load_s * setting.prefill_tokens_s / setting.chunk_tokens)

    def choose(request: TraceRequest) -> int:
        held = []
        for machine in fleet.machines:
            l1 = machine.player.held_chunks(fleet.trace, request)
            more = machine.player.held_chunks(fleet.trace, request, tier=True) - l1
            held.append((l1 + saved * more) * setting.chunk_tokens)
        return fleet.soonest(request, held)

    return choose


ROUTERS: Final[dict[str, Callable[[Fleet], Callable[[TraceRequest], int]]]] = {
    "in turns": in_turns,
    "least busy": least_busy,
    "remembers": remembers,
    "knows L1": knows_l1,
    "knows tiers": knows_tiers,
}


def play(
    trace: Trace, setting: Setting, model: Model, machines: int, router: str, own: bool = False
) -> Fleet:
    """Play all of ``trace`` through a new fleet. ``own``: each machine has a store of its own."""
    shared = None if own else SimulatedStore(setting.l2_bytes)
    all_of = [Machine(Player(setting, {0: model}, shared)) for _ in range(machines)]
    fleet = Fleet(trace, model, all_of, [set() for _ in all_of])
    choose = ROUTERS[router](fleet)
    for request in trace.requests:
        fleet.ask(choose(request), request)
    return fleet


def figures(fleet: Fleet) -> dict[str, float]:
    """By the names in this module's docstring."""
    players = [machine.player for machine in fleet.machines]
    asked = sum(player.outcome.input_tokens for player in players)
    found = sum(player.outcome.hit_tokens for player in players)
    loaded = sum(player.outcome.from_l2_tokens for player in players)
    given = sum(player.tier.loaded_bytes for player in players)
    written = sum(player.tier.stored_bytes for player in players)
    work = [machine.work_s for machine in fleet.machines]
    seconds = max(fleet.trace.seconds, 1e-9)
    return {
        "computed": 1 - found / asked,
        "from L1": (found - loaded) / asked,
        "from store": loaded / asked,
        "first token": float(np.median(fleet.first_token_s)),
        "99th": float(np.quantile(fleet.first_token_s, 0.99)),
        "read GB/s": given / seconds / 1e9,
        "gets/s": given / fleet.model.row_bytes / seconds,
        "written GB/s": written / seconds / 1e9,
        "busiest": max(work) * len(work) / sum(work),
    }


def made(kind: str, requests: int, sessions_s: float, seed: int) -> Trace:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{kind}.jsonl"
        write(path, kind, requests, seed, sessions_s)
        return read(path)


def run(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet")
    parser.add_argument("--machines", type=int, default=64)
    parser.add_argument("--kind", choices=KINDS, default="agents")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--sessions-s", type=float, default=3.0)
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--l1", default="128GiB", help="of one machine")
    parser.add_argument("--l2", default="64TiB", help="of the store; 0: none")
    parser.add_argument("--own", action="store_true", help="each machine has such a store: a disk")
    parser.add_argument("--l2-speed", default="1GB,6GB", help="of one machine, bytes a second")
    parser.add_argument("--prefill-tokens-s", type=float, default=20_000)
    parser.add_argument("--routers", default=",".join(ROUTERS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    trace = made(args.kind, args.requests, args.sessions_s, args.seed)
    model = Model(512, layout(layers_of(args.model), BLOCK_TOKENS))
    rows: list[dict[str, Any]] = []
    for speed in args.l2_speed.split(","):
        setting = Setting(
            Size.parse(args.l1),
            model.chunk_tokens,
            Size.parse(args.l2),
            float(Size.parse(speed)),
            args.prefill_tokens_s,
        )
        for router in args.routers.split(","):
            fleet = play(trace, setting, model, args.machines, router, args.own)
            rows.append({"store": speed, "router": router} | figures(fleet))
            print(rows[-1], file=sys.stderr)
    print(json.dumps(rows, indent=1) if args.json else table(trace, rows))
    return 0


def table(trace: Trace, rows: Sequence[dict[str, Any]]) -> str:
    """A table in Markdown."""
    asked = trace.input_tokens / trace.seconds
    lines = [
        f"{len(trace.requests):,} requests in {trace.seconds:,.0f} s, {asked:,.0f} prompt tokens a "
        f"second, {trace.unique_tokens / trace.input_tokens:.0%} of them new",
        "",
        "| " + " | ".join(rows[0]) + " |",
        "| " + " | ".join("---" for _ in rows[0]) + " |",
    ]
    for row in rows:
        cells = [each if isinstance(each, str) else f"{each:.3g}" for each in row.values()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
