"""``python -m bench.gpu_day``: see the package's docstring."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.gpu_day.carry import CARRY, lacking, what_to_carry
from bench.gpu_day.day import BAD, MEASURED, Day, facts, page, read_day
from bench.gpu_day.sizes import fitting, found_room, place
from bench.gpu_day.stages import Stage, table
from bench.gpu_day.worker import Worker, ended_well
from kvass.cli.bench.rig import say
from kvass.errors import ConfigError

SMOKE_MINUTES: Final = 2.0
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
    day = Day(args.out)
    room = found_room()
    try:
        sizes = None if args.smoke else fitting(room, day.read().get("sizes", ""))
        about = {"runner": args.runner and f"V{1 + int(args.runner)} for all"}
        about["sizes"] = "tiny" if sizes is None else sizes.said
        day.about(facts(args.smoke) | about)
    except ConfigError as error:
        print(f"gpu_day: {error}", file=sys.stderr)
        return 2
    if not args.smoke and (lacks := lacking()):
        say(f"with what is here, which is not {', '.join(lacks)}")
    minutes = args.minutes or (SMOKE_MINUTES if args.smoke else 9.0)
    within = args.within or place(room, sizes, tempfile.gettempdir())
    with tempfile.TemporaryDirectory(dir=within, prefix="kvass-day-") as folder:
        config = {"table": args.table, "out": str(args.out), "folder": folder}
        config["sizes"] = msgspec.to_builtins(sizes)
        config |= {"smoke": args.smoke, "forks": args.forks, "runner": args.runner}
        run(chosen, day, minutes, config)
    states = {day.states().get(one.name, "") for one in chosen}
    print(page([day.read()]), end="")
    return int("done" not in states or not states.isdisjoint(BAD))


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
    worker: Worker | None = None
    ran = dict[tuple[str, str], Stage]()  # to their end: by what they run, and with which runner
    with Path(config["out"]).with_suffix(".log").open("ab") as log:
        for stage in stages:
            left_s, limit_s = until_s - time.monotonic(), 60 * stage.minutes
            if config["smoke"]:
                limit_s = max(0.0, left_s)  # a stage's minutes are those of a GPU
            why = _why_not(stage, left_s, limit_s)
            runner = config["runner"] or stage.runner
            twin = ran.get((stage.runs, runner))
            if twin is not None and twin.runner != stage.runner:
                why = f"{twin.name} had the same runner"
            if why:
                say(f"{stage.name}: skipped, {why}")
                day.end(stage.name, "skipped", why)
                continue
            say(f"{stage.name}: {stage.subject}")
            day.begin(stage.name)
            began_s = time.monotonic()
            worker = worker or Worker(config, log)
            if not worker.give(stage.name):  # it ended after its last stage: killed for memory, say
                worker.kill()
                worker = Worker(config, log)
                worker.give(stage.name)
            state, why = worker.ended(limit_s)
            say(f"{stage.name}: {state} after {time.monotonic() - began_s:.0f} s {why}")
            if not ended_well(state):
                worker.kill()
                worker = None
                day.end(stage.name, state, why, time.monotonic() - began_s)
            refused = "v2_refused" in day.read()["stages"][stage.name]["figures"]
            if not config["runner"] and (refused or _v2_hung(day, stage, state)):
                say("vLLM's model runner V2 ran no engine: V1 runs from now on")
                config = config | {"runner": "0"}
            if state in MEASURED:
                ran[stage.runs, "0" if refused else runner] = stage  # refused: V1 ran it at once
        if worker is not None:
            worker.close()


def _v2_hung(day: Day, stage: Stage, state: str) -> bool:
    """Whether V2 was cut before its first engine was up."""
    figures = [one.get("figures", {}) for one in day.read()["stages"].values()]
    hung = state == "cut" and stage.runner == "1" and "vllm" in stage.needs
    return hung and not any(one.get("runner") == "V2" for one in figures)


def _why_not(stage: Stage, left_s: float, limit_s: float) -> str:
    """Why a stage is skipped; empty if it is not."""
    if missing := [name for name in stage.needs if find_spec(name) is None]:
        return f"{' and '.join(missing)} not installed"
    if limit_s <= 0 or limit_s > left_s:
        return f"it may take {stage.minutes:g} minutes, and {max(0.0, left_s) / 60:.1f} are left"
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
    sys.exit(main())
