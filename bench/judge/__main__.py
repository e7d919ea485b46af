"""``python -m bench.judge``: see the package's docstring."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import msgspec

from bench.engine import BLOCK, rotated
from bench.judge import aiperf
from bench.judge.contenders import BLOCKS, CONTENDERS, COUNTERS, Contender
from bench.judge.model import PRETRAINED, model
from bench.judge.workloads import WORKLOADS, Place, Workload
from bench.peers import report
from bench.peers.__main__ import machine, python, versions
from bench.peers.engineless import Plan
from bench.peers.engines import L1_BYTES, SERVED
from bench.peers.results import Results, Row, attempt, now
from kvass.cli.bench.rig import say
from kvass.errors import ConfigError, KvassError, Unavailable

PAGE: Final = Path(__file__).with_name("page.md")
ROUNDS: Final = 3
FEW: Final = " That is too few: who leads may be noise."
CLIENT_S: Final = 600.0


class Judged(msgspec.Struct):
    """A run. ``commands``: of the servers and of the first round, by what they are for."""

    results: Results
    commands: dict[str, str] = {}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the page; the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended then too
    args = _parser().parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        if args.render:
            judged = msgspec.json.decode(args.render.read_bytes(), type=Judged)
        else:
            judged = judge(args.only, 1 if args.short else args.rounds, args.out / "judge.json")
    except KvassError as error:
        print(f"judge: {error}", file=sys.stderr)
        return 2
    for path in (args.out / "judge.md", args.page):
        if path is not None:
            path.write_text(markdown(judged))
            print(path)
    return 0


def judge(only: str | None, rounds: int, to: Path) -> Judged:
    """A run, saved after each part of a round. Raises ``KvassError``."""
    chosen = [one for one in WORKLOADS if only is None or one.name in only.split(",")]
    if not chosen:
        raise ConfigError(f"--only {only}: they are {', '.join(one.name for one in WORKLOADS)}")
    began_s = time.monotonic()
    about = versions() | {"AIPerf": aiperf.version()}
    judged = Judged(Results(machine(), about, rounds, now()))
    rows = {one.name: rows_of(judged.results, one) for one in chosen}

    def save() -> None:
        judged.results.minutes = (time.monotonic() - began_s) / 60
        to.write_bytes(msgspec.json.format(msgspec.json.encode(judged), indent=1))

    with ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="kvass-judge-")))
        ending.callback(keep_logs, folder, to.parent / "logs")
        plan = Plan(python(), folder, folder, rounds)
        for name in dict.fromkeys(one.model for one in chosen):
            mine = [one for one in chosen if one.model == name]
            judge_model(judged, plan, mine, rows, save)
    if not any(row.samples for row in judged.results.rows):
        raise Unavailable(f"nothing was measured: {judged.results.rows[0].trouble}")
    return judged


def judge_model(
    judged: Judged,
    plan: Plan,
    workloads: Sequence[Workload],
    rows: Mapping[str, Sequence[Row]],
    save: Callable[[], None],
) -> None:
    """All rounds of workloads of one model."""
    with ExitStack() as ending:
        every = [row for one in workloads for row in rows[one.name]]
        contenders = started(judged, plan, workloads[0].model, every, ending)
        for number in range(plan.rounds if contenders else 0):
            for workload in workloads:
                judge_round(judged, plan, contenders, workload, number, rows[workload.name])
                save()
        save()


def keep_logs(folder: Path, to: Path) -> None:
    """Copy the servers' logs, and what ``kvass explain`` said after each round: they say why a
    server found less than another one did. ``to`` has those of the last run alone."""
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    for kept in (*folder.glob("*.log"), *folder.glob("*.json")):
        shutil.copy(kept, to)


def judge_round(
    judged: Judged,
    plan: Plan,
    contenders: Mapping[str, Contender],
    workload: Workload,
    number: int,
    rows: Sequence[Row],
) -> None:
    """All that have not failed, another one first in each round."""
    for name in rotated(list(contenders), number):
        if any(name in row.trouble for row in rows):
            continue
        say(f"{workload.name}, {name}, round {number + 1}")
        with attempt(name, *rows):
            figures, command = ask(plan, contenders[name], workload, number)
            judged.commands.setdefault(workload.name, shortened(command, plan))
            for row in rows:
                row.add(name, figures[row.what])


def rows_of(results: Results, workload: Workload) -> list[Row]:
    """The figures that the workload's program writes, and what vLLM counted."""
    units = workload.metrics | dict.fromkeys(COUNTERS, "tok")
    return [
        results.row(workload.name, f"{workload.name}_{name}", name, unit, more=unit != "ms")
        for name, unit in units.items()
    ]


def started(
    judged: Judged, plan: Plan, weights: str, rows: Sequence[Row], ending: ExitStack
) -> dict[str, Contender]:
    """The contenders that start; the others have their reason in all rows."""
    launched = dict[str, Contender]()
    for name in CONTENDERS:
        say(f"the start of {name}, {weights}")
        with attempt(name, *rows):
            whole, cache = model(weights, plan.folder), None
            if name in SERVED:
                cache = plan.server(name, L1_BYTES)
                ending.callback(cache.close)
                cache.start()
                judged.commands[f"{name}'s server"] = shortened(cache.command(), plan)
            log, drafts = plan.folder / f"vllm-{whole.name}-{name}.log", weights == PRETRAINED
            contender = Contender(name, whole, log, plan.python, cache, drafts=drafts)
            ending.callback(contender.close)
            contender.launch()
            judged.commands[f"vLLM's server, {name}, {weights}"] = shortened(
                contender.command, plan
            )
            launched[name] = contender
    found = {}
    for name, contender in launched.items():
        with attempt(name, *rows):
            contender.wait_ready()
            found[name] = contender
    return found


def ask(
    plan: Plan, contender: Contender, workload: Workload, number: int
) -> tuple[dict[str, float], list[str]]:
    """The figures of one round, and its command. Raises ``Unavailable``."""
    folder = plan.folder / f"{workload.name}-{contender.name}-{number}"
    folder.mkdir()
    place = Place(plan.python, contender.url, contender.model, folder, number, aiperf.interpreter())
    command, before = workload.command(place), contender.found()
    environment = os.environ | {
        "PYTHONHASHSEED": str(number),
        "HF_HUB_OFFLINE": "1" if workload.offline else "",
        "TRANSFORMERS_OFFLINE": "",  # AIPerf takes it for the same
        "TMPDIR": str(plan.folder),  # AIPerf leaves folders there
    }
    with (folder / "client.log").open("wb") as log:
        try:
            done = subprocess.run(
                command, stdout=log, stderr=log, env=environment, timeout=CLIENT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise Unavailable(f"did not end within {CLIENT_S:.0f} s") from None
    if done.returncode:
        tail = (folder / "client.log").read_text(errors="replace").strip().splitlines()[-1:]
        raise Unavailable(f"{workload.name} ended with status {done.returncode}: {''.join(tail)}")
    counted = {name: value - before[name] for name, value in contender.found().items()}
    if explained := contender.explained():
        folder.with_suffix(".json").write_bytes(msgspec.json.encode(explained))
    return workload.figures(folder) | counted, command


def shortened(command: Sequence[str], plan: Plan) -> str:
    """A command without this run's folder, and interpreters."""
    text = shlex.join(command)
    for one in (aiperf.interpreter(), plan.python, sys.executable):
        text = text.replace(one, "python") if one else text
    return text.replace(str(plan.folder), "FOLDER")


def markdown(judged: Judged) -> str:
    """The page."""
    results = judged.results
    about = results.machine | results.versions
    values = {
        "began": results.began,
        "minutes": f"{results.minutes:.0f}",
        "machine": "\n".join(f"- {name}: {what}" for name, what in about.items()),
        "own": f"{BLOCKS * BLOCK:,}",
        "commands": "\n".join(f"# {name}\n{text}" for name, text in judged.commands.items()),
        **{f"table {one.name}": table(results.rows, one) for one in WORKLOADS},
    }
    return re.sub(r"\{([\w -]+)\}", lambda found: values[found[1]], PAGE.read_text())


def table(rows: Sequence[Row], workload: Workload) -> str:
    """The table, of which model it is, and of how many rounds: a run that was ended early has
    fewer."""
    mine = [row for row in rows if row.part == workload.name]
    counts = [len(samples) for row in mine for samples in row.samples.values()]
    text = report.table(mine, workload.name)
    if not counts:
        return text if any(row.trouble for row in mine) else "Not measured."
    few = FEW * (min(counts) < ROUNDS)
    return f"{text}\n\nModel: {workload.model}. Rounds: {min(counts)}.{few}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.judge", description="Benchmarks that others wrote, side by side."
    )
    names = ",".join(one.name for one in WORKLOADS)
    parser.add_argument("--only", metavar="WORKLOADS", help=f"some of {names}")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help="(%(default)s)")
    parser.add_argument("--short", action="store_true", help="a try: one round")
    parser.add_argument("--out", type=Path, default=Path(".cache/judge"), help="(%(default)s)")
    parser.add_argument("--page", type=Path, help="write the page there too")
    parser.add_argument("--render", type=Path, metavar="JSON", help="write the page of a run")
    return parser


if __name__ == "__main__":
    sys.exit(main())
