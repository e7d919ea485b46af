"""``python -m bench.gpu_day``: see the package's docstring."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.gpu_day.carry import CARRY, lacking, what_to_carry
from bench.gpu_day.day import BAD, MEASURED, Day, facts, page, read_day
from bench.gpu_day.folder import own_folder, remove_left
from bench.gpu_day.sizes import SHM, Room, Sizes, agree, fitting, found_room, place
from bench.gpu_day.stages import SIZED, Stage, table
from bench.gpu_day.worker import Workers, ended_well
from kvass.cli.bench.rig import say
from kvass.errors import ConfigError

SMOKE_MINUTES: Final = 2.0
SETTLE_S: Final = 10.0
TABLE: Final = "bench.gpu_day.stages"


def main(argv: Sequence[str] | None = None) -> int:
    """Run stages, or say what the flags ask for; the exit status."""
    args = _parser().parse_args(argv)
    if args.page:
        return _print_page(args.page)
    if args.what_to_carry:
        text, fits = what_to_carry(CARRY)
        print(text)
        return 0 if fits else 1
    stages: tuple[Stage, ...] = import_module(args.table).STAGES
    if unknown := set(args.only) - {one.name for one in stages}:
        print(f"gpu_day: no stage {', '.join(sorted(unknown))}; see --help", file=sys.stderr)
        return 2
    first = [one for one in stages if one.runner == "1" or not args.smoke]  # on a CPU there is one
    chosen = [one for one in first if not args.only or one.name in args.only]
    places = [args.within] if args.within else [SHM, tempfile.gettempdir()]
    remove_left(*places)
    room = found_room() if args.smoke else _room(args.out)
    day, sizes = _day(args, room)
    take_over(day, args.out, stages)
    todo = chosen if args.only else left(chosen, day.read()["stages"])
    minutes = args.minutes or (SMOKE_MINUTES if args.smoke else 9.0)
    if not args.smoke:
        if lacks := lacking():
            say(f"with what is here, which is not {', '.join(lacks)}")
        print(plan(todo, minutes), file=sys.stderr, flush=True)
    within = args.within or place(room, sizes, tempfile.gettempdir())
    with own_folder(within) as folder:
        config = {"table": args.table, "out": str(day.path), "folder": folder}
        config["sizes"] = msgspec.to_builtins(sizes)
        runner = args.runner or "0" * refused_v2(day.read()["stages"])
        config |= {"smoke": args.smoke, "forks": args.forks, "runner": runner}
        run(todo, day, minutes, config)
    states = {day.states().get(one.name, "") for one in chosen}
    print(page([day.read()]), end="")
    return int("done" not in states or not states.isdisjoint(BAD))


def _room(out: Path) -> Room:
    """What is free. Memory of a call that was killed may not be yet: wait for as much as its file
    says it had."""
    said = "tiny"
    with suppress(ConfigError):
        said = Day(out).read().get("sizes", said)
    until_s = time.monotonic() + SETTLE_S
    while True:
        room = found_room()
        if said in ("tiny", fitting(room, said).said) or time.monotonic() >= until_s:
            return room
        time.sleep(0.5)


def _day(args: argparse.Namespace, room: Room) -> tuple[Day, Sizes | None]:
    """The file of ``--out``; if that is of another card or day, the next name that is not."""
    number, out = 1, args.out
    while True:
        try:
            day = Day(out)
            sizes = None if args.smoke else fitting(room, day.read().get("sizes", ""))
            about = {"runner": args.runner and f"V{1 + int(args.runner)} for all"}
            about["sizes"] = "tiny" if sizes is None else sizes.said
            day.about(facts(args.smoke) | about)
            return day, sizes
        except ConfigError as error:
            number += 1
            out = _numbered(args.out, number)
            say(f"into {out}: {error}")


def take_over(day: Day, first: Path, stages: Sequence[Stage]) -> None:
    """Take what other files of this card and day have measured of stages whose figures would be the
    same with the sizes of this one."""
    number = 1
    while (path := _numbered(first, number)).exists():
        number += 1
        with suppress(ConfigError):  # no file of a day
            own, other = day.read(), read_day(path)
            if any(own[name] != other.get(name) for name in own.keys() - {"stages", "sizes"}):
                continue
            for one in (s for s in stages if s.runs in SIZED):
                known, has = (d["stages"].get(one.name, {"state": ""}) for d in (other, own))
                wanted = known["state"] in MEASURED and has["state"] not in MEASURED
                if wanted and agree(own["sizes"], other.get("sizes", ""), SIZED[one.runs]):
                    day.take(one.name, known)
                    say(f"{one.name}: {known['state']}, of {path}")


def _numbered(out: Path, number: int) -> Path:
    return out.with_stem(f"{out.stem}-{number}") if number > 1 else out


def left(stages: Sequence[Stage], states: dict[str, Any]) -> list[Stage]:
    """What earlier calls left to do; what failed or was cut there comes last. If they found that V2
    runs no engine, V1 runs what V2 would, once."""
    by_v2 = {one.runs for one in stages if one.runner == "1"} if refused_v2(states) else set()

    def had(stage: Stage, *some: str) -> bool:
        return states.get(stage.name, {}).get("state") in some

    rest = [one for one in stages if not had(one, *MEASURED)]
    rest = [one for one in rest if one.runner == "1" or one.runs not in by_v2]
    return sorted(rest, key=lambda one: had(one, "failed", "cut"))


def refused_v2(states: dict[str, Any]) -> bool:
    """Whether V2 was tried, and ran no engine."""
    figures = [one.get("figures", {}) for one in states.values()]
    return any("v2_refused" in one for one in figures) and not _came_up(states, "V2")


def plan(stages: Sequence[Stage], minutes: float) -> str:
    """What this call and further ones as long will do, if each stage takes what it may."""
    lines, call, rest = [f"the plan of {minutes:g} minutes a call:"], 0, list(stages)
    while rest:
        call, at_s, later = call + 1, 0.0, []
        for one in rest:
            if never := _why_not(one, 60 * minutes):
                when = f"not: {never}"
            elif _why_not(one, 60 * minutes - at_s):
                later.append(one)
                continue
            else:
                when = f"call {call}, second {at_s:.0f}"
                at_s += one.seconds
            lines.append(f"  {one.name:<13} {one.seconds:>4g} s  {when}")
        rest = later
    return "\n".join(lines)


def _print_page(files: Sequence[str]) -> int:
    """Of the files that can be read; the exit status."""
    days = []
    for one in files:
        try:
            days.append(read_day(Path(one)))
        except (ConfigError, OSError) as error:
            print(f"gpu_day: {error}", file=sys.stderr)
    print(page(days), end="")
    return int(len(days) < len(files))


def run(stages: Sequence[Stage], day: Day, minutes: float, config: dict[str, Any]) -> None:
    """The stages that fit. Whatever becomes of one, the others run."""
    until_s = time.monotonic() + 60 * minutes
    no_engine = ""  # why none starts here, neither with V2 nor with V1
    ran = dict[tuple[str, str], Stage]()  # to their end: by what they run, and with which runner
    with Path(config["out"]).with_suffix(".log").open("ab") as log, Workers(log) as workers:
        for stage in stages:
            left_s = until_s - time.monotonic()
            why = _why_not(stage, left_s, config["smoke"])
            runner = config["runner"] or stage.runner
            twin = ran.get((stage.runs, runner))
            if twin is not None and twin.runner != stage.runner:
                why = f"{twin.name} had the same runner"
            if no_engine and "vllm" in stage.needs:
                why = f"no engine started: {no_engine}"
            if why:
                say(f"{stage.name}: skipped, {why}")
                day.end(stage.name, "skipped", why)
                continue
            say(f"{stage.name}: {stage.subject}")
            day.begin(stage.name)
            began_s = time.monotonic()
            limit_s = left_s if config["smoke"] else min(left_s, 2 * stage.seconds)
            state, why = workers.run(stage.name, limit_s, config)
            took_s = time.monotonic() - began_s
            say(f"{stage.name}: {state} after {took_s:.0f} s {why}")
            if not ended_well(state):
                day.end(stage.name, state, why, took_s)
            states = day.read()["stages"]
            figures = states[stage.name]["figures"]
            refused = "v2_refused" in figures
            if not config["runner"] and (refused or _v2_hung(states, stage, state)):
                say("vLLM's model runner V2 ran no engine: V1 runs from now on")
                config = config | {"runner": "0"}
            if "engine_died" in figures and not _came_up(states, "V1", "V2"):
                no_engine = why
            if state in MEASURED:
                ran[stage.runs, "0" if refused else runner] = stage  # refused: V1 ran it at once


def _v2_hung(states: dict[str, Any], stage: Stage, state: str) -> bool:
    """Whether V2 was cut before its first engine was up."""
    hung = state == "cut" and stage.runner == "1" and "vllm" in stage.needs
    return hung and not _came_up(states, "V2")


def _came_up(states: dict[str, Any], *runners: str) -> bool:
    """Whether an engine was ever up, with one of these runners."""
    return any(one.get("figures", {}).get("runner") in runners for one in states.values())


def _why_not(stage: Stage, left_s: float, smoke: bool = False) -> str:
    """Why a stage is skipped; empty if it is not. Seconds are those of a GPU."""
    if missing := [name for name in stage.needs if find_spec(name) is None]:
        return f"{' and '.join(missing)} not installed"
    if left_s < (0 if smoke else stage.seconds):
        return f"it may take {stage.seconds:g} s, and {max(0.0, left_s):.0f} are left"
    return ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_day",
        description="All that only a GPU can tell, by itself, in order of worth.",
        epilog=table(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", action="append", default=[], metavar="STAGE", help="repeatable")
    parser.add_argument("--minutes", type=float, help="of all stages (9; of a smoke run 2)")
    parser.add_argument("--smoke", action="store_true", help="on a CPU, with fakes")
    out = Path("gpu-day.json")
    parser.add_argument("--out", type=Path, default=out, help="the day's file (%(default)s)")
    one = (
        "1 or 0: vLLM's model runner V2 or V1, for all stages (V2, and V1 where the table says so)"
    )
    parser.add_argument("--runner", choices=["0", "1"], default="", help=one)
    parser.add_argument("--what-to-carry", action="store_true", help="what a bare machine needs")
    parser.add_argument("--page", nargs="+", metavar="JSON", help="a page of these days")
    parser.add_argument("--table", default=TABLE, help=argparse.SUPPRESS)
    hidden = argparse.SUPPRESS  # where a template forks engines of a smoke run (tests)
    parser.add_argument("--within", default="", help=hidden)  # of models and sockets
    parser.add_argument("--forks", default="", help=hidden)
    return parser


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):  # what was started is ended, too
        signal.signal(number, lambda ended, _: sys.exit(128 + ended))
    sys.exit(main())
