"""``make test-upstream``: vLLM's own tests of its schedulers and connectors, alone and with kvass.

``python -m tests.support.upstream FOLDER VERSION...``. ``FOLDER`` is what
``requirements/upstream.sh`` made. For each version it prints how many tests have which outcome,
with vLLM alone and with kvass in a ``MultiConnector``, and in how many tests kvass was asked for
hits. The exit status is 0 if exactly the tests of ``explained.py`` differ.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tests.support.upstream.explained import CONNECTORS, EXPLAINED, FILES
from tests.support.upstream.hub import write_hub

ALONE: Final = ""
MODES: Final = {ALONE: "vLLM alone", "last": "with kvass"}
PLUGIN: Final = Path(__file__).parent / "kvass_beside.py"
OUTCOMES: Final = ("passed", "failed", "skipped")


class Found(NamedTuple):
    """What a run of the tests wrote: outcomes by test, and what kvass did in each test."""

    outcomes: dict[str, str]
    kvass: dict[str, dict[str, int]]

    @property
    def asked(self) -> int:
        """The tests in which the scheduler asked kvass for hits."""
        return sum(1 for did in self.kvass.values() if did.get("lookups"))


def run(folder: Path, version: str, mode: str) -> Found:
    """Run the tests of ``version`` in ``mode``."""
    place = (folder / version).absolute()
    report = place / f"{mode or 'alone'}.json"
    report.unlink(missing_ok=True)
    overlay = Path(sys.prefix, "overlays", version)
    paths = [*([overlay] if overlay.is_dir() else []), folder.absolute() / "packages", place]
    environment = {
        **os.environ,
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HOME": str(folder.absolute() / "models"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "BESIDE": mode,
        "BESIDE_REPORT": str(report),
        "PYTHONPATH": os.pathsep.join(map(str, [*paths, PLUGIN.parent])),
    }
    tests = [name for name in FILES if (place / name).exists()]
    if not tests:
        raise SystemExit(f"{place} has none of vLLM's tests: requirements/upstream.sh takes them")
    options = ["-q", "-p", PLUGIN.stem, "-p", "no:cacheprovider", "--timeout=300", "--tb=short"]
    options += ["--show-capture=no", "--continue-on-collection-errors"]
    with report.with_suffix(".log").open("w") as log:
        subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=place,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if not report.exists():
        raise SystemExit(f"no tests were run: see {log.name}")
    return Found(**json.loads(report.read_text()))


def differences(alone: Mapping[str, str], beside: Mapping[str, str]) -> dict[str, str]:
    """The tests with another outcome beside kvass than alone, and how."""
    return {
        name: f"{outcome} alone, {beside.get(name, 'not run')} with kvass"
        for name, outcome in alone.items()
        if beside.get(name) != outcome
    }


def unexplained(found: Mapping[str, str], alone: Iterable[str]) -> list[str]:
    """What contradicts ``EXPLAINED``: a test that differs and is not there, or one that is there
    and does not differ (``alone``: all tests of this version)."""
    listed = {name for names in EXPLAINED.values() for name in names}
    short = {name: name.removeprefix(CONNECTORS) for name in alone}
    wrong = [f"{name}: {how}" for name, how in found.items() if short[name] not in listed]
    same = [name for name in short if short[name] in listed and name not in found]
    return wrong + [f"{name}: is listed as different, and is not" for name in same]


def line(name: str, found: Found) -> str:
    """The counts of one run."""
    counts = Counter(found.outcomes.values())
    told = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES)
    others = sum(counts.values()) - sum(counts[outcome] for outcome in OUTCOMES)
    more = f", {others} files not imported" if others else ""
    return f"{name}: {told}{more}" + (f"; kvass was asked in {found.asked}" if found.kvass else "")


def main(folder: Path, versions: Iterable[str], modes: Iterable[str]) -> int:
    """The exit status."""
    write_hub(folder / "models")
    wrong: list[str] = []
    for version in versions:
        print(f"== vLLM {version}", flush=True)
        alone = run(folder, version, ALONE)
        print(line(MODES[ALONE], alone), flush=True)
        for mode in modes:
            beside = run(folder, version, mode)
            found = differences(alone.outcomes, beside.outcomes)
            print(f"{line(MODES[mode], beside)}; {len(found)} differ", flush=True)
            wrong += [f"{version} {mode}: {one}" for one in unexplained(found, alone.outcomes)]
            if "passed" not in alone.outcomes.values() or not beside.asked:
                wrong.append(f"{version} {mode}: no test passed, or none asked kvass for hits")
    for one in wrong:
        print(one, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:], ("last",)))
