"""``python -m bench.gpu_day``: see the package's docstring."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from bench.gpu_day.day import BAD, Day, facts, page
from bench.gpu_day.stages import Stage, table
from bench.gpu_day.worker import Worker, ended_well
from kvass.cli.bench.rig import say
from kvass.errors import ConfigError

ROOT: Final = Path(__file__).parents[2]
CARRY: Final = ROOT / ".cache" / "gpu-day"
MOST_BYTES: Final = 64 << 20
SMOKE_MINUTES: Final = 2.0
TABLE: Final = "bench.gpu_day.stages"


def main(argv: Sequence[str] | None = None) -> int:
    """Run stages, or say what the flags ask for; the exit status."""
    args = _parser().parse_args(argv)
    if args.page:
        print(page([json.loads(Path(one).read_text()) for one in args.page]), end="")
        return 0
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
    try:
        day.about(
            facts(args.smoke) | {"runner": args.runner and f"V{1 + int(args.runner)} for all"}
        )
    except ConfigError as error:
        print(f"gpu_day: {error}", file=sys.stderr)
        return 2
    minutes = args.minutes or (SMOKE_MINUTES if args.smoke else 9.0)
    with tempfile.TemporaryDirectory(dir=args.within, prefix="kvass-day-") as folder:
        config = {"table": args.table, "out": str(args.out), "folder": folder}
        config |= {"smoke": args.smoke, "forks": args.forks, "runner": args.runner}
        run(chosen, day, minutes, config)
    states = {day.states().get(one.name, "") for one in chosen}
    print(page([day.read()]), end="")
    return int("done" not in states or not states.isdisjoint(BAD))


def run(stages: Sequence[Stage], day: Day, minutes: float, config: dict[str, Any]) -> None:
    """The stages that fit. Whatever becomes of one, the others run."""
    until_s = time.monotonic() + 60 * minutes
    worker: Worker | None = None
    with Path(config["out"]).with_suffix(".log").open("ab") as log:
        for stage in stages:
            left_s, limit_s = until_s - time.monotonic(), 60 * stage.minutes
            if config["smoke"]:
                limit_s = max(0.0, min(limit_s, left_s))
            if why := _why_not(stage, left_s, limit_s):
                say(f"{stage.name}: skipped, {why}")
                day.end(stage.name, "skipped", why)
                continue
            say(f"{stage.name}: {stage.subject}")
            worker = worker or Worker(config, log)
            day.begin(stage.name)
            began_s = time.monotonic()
            state, why = worker.run(stage.name, limit_s)
            say(f"{stage.name}: {state} after {time.monotonic() - began_s:.0f} s {why}")
            if not ended_well(state):
                worker.kill()
                worker = None
                day.end(stage.name, state, why, time.monotonic() - began_s)
        if worker is not None:
            worker.close()


def _why_not(stage: Stage, left_s: float, limit_s: float) -> str:
    """Why a stage is skipped; empty if it is not."""
    if missing := [name for name in stage.needs if find_spec(name) is None]:
        return f"{' and '.join(missing)} not installed"
    if limit_s <= 0 or limit_s > left_s:
        return f"it may take {stage.minutes:g} minutes, and {max(0.0, left_s) / 60:.1f} are left"
    return ""


def what_to_carry(folder: Path) -> tuple[str, bool]:
    """What a bare machine needs, with sizes, and whether it fits into one call. What must be in the
    ignored ``folder`` is wheels. Models have random weights and are made there."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    files = [ROOT / os.fsdecode(name) for name in names if name]
    tree = sum(file.stat().st_size for file in files if file.is_file())
    carried = {file: file.stat().st_size for file in sorted(folder.rglob("*")) if file.is_file()}
    total = tree + sum(carried.values())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wants = [*project["dependencies"], "torch", "safetensors", "transformers", "pytest"]
    wants += ["pytest-timeout", "hypothesis", "vllm (for most stages)", "sglang (for one)"]
    lines = [f"{tree / 2**20:6.1f} MiB  the tree (tracked, and untracked but not ignored)"]
    lines += [f"{n / 2**20:6.1f} MiB  {os.path.relpath(file, ROOT)}" for file, n in carried.items()]
    lines += [f"{total / 2**20:6.1f} MiB  of {MOST_BYTES >> 20} in all"]
    lines += [f"the machine must have, or {os.path.relpath(folder, ROOT)}/ as wheels:"]
    lines += [f"  {one}" for one in wants]
    if total > MOST_BYTES:
        lines += ["TOO MUCH for one call: carry parts of it in several (split -b 48M)"]
    return "\n".join(lines), total <= MOST_BYTES


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
    parser.add_argument("--within", default="/dev/shm", help=hidden)  # of models and sockets
    parser.add_argument("--forks", default="", help=hidden)
    return parser


if __name__ == "__main__":
    sys.exit(main())
