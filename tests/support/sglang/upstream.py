"""SGLang's own tests with its storage backend "file", and with kvass in its place.

``python -m tests.support.sglang.upstream [PATH...]`` with ``SGLANG_OVERLAYS``: each path is a test
file or a folder of a checkout of SGLang of the newest tested version; without one, the fixtures
that are in its wheel (``kit_cases.py``). Prints how many tests pass, fail and are skipped with each
backend, and those with different results; then the exit status is 1. Tests that need a GPU fail
with both.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvass._version import TESTED_SGLANG
from kvass.testing.daemon import running_daemon
from tests.support.sglang.file_is_kvass import VARIABLE
from tests.support.sglang.server import environment

CASES: Final = Path(__file__).parent / "kit_cases.py"
PLUGIN: Final = "tests.support.sglang.file_is_kvass"
LIMIT_S: Final = 1800.0
CASE_S: Final = 300
"""The most that one test takes; then it has failed."""


def run(paths: Sequence[str], folder: Path, backend: str, socket: str) -> dict[str, str]:
    """The result of each test, by its name."""
    report = folder / f"{backend}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", str(folder)]
    command += [
        "--noconftest",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.support.sglang.file_is_kvass",
    ]
    command += ["--timeout", str(CASE_S)]
    command += ["-o", "python_classes=Test", f"--junitxml={report}", *paths]
    env = environment(max(TESTED_SGLANG)) | ({VARIABLE: socket} if socket else {})
    with (folder / f"{backend}.log").open("wb") as log:
        subprocess.run(
            command, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False
        )
    if not report.exists():
        raise SystemExit(f"{backend}: pytest ended without a report:\n{tail(folder, backend)}")
    return {
        f"{case.get('classname')}.{case.get('name')}": result(case)
        for case in ElementTree.parse(report).iter("testcase")
    }


def result(case: ElementTree.Element) -> str:
    tags = {child.tag for child in case}
    return "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"


def tail(folder: Path, backend: str) -> str:
    return (folder / f"{backend}.log").read_text(errors="replace")[-3000:]


def main(paths: Sequence[str]) -> int:
    chosen = [str(Path(path).absolute()) for path in paths] or [str(CASES)]
    with tempfile.TemporaryDirectory(prefix="kvass-sglang-") as name:
        folder = Path(name)
        with running_daemon(folder, l1_size="512MiB", lookup_budget_ms=10_000) as daemon:
            found = {"file": run(chosen, folder, "file", "")}
            found["kvass"] = run(chosen, folder, "kvass", daemon.socket)
        made = {backend: tail(folder, backend).splitlines() for backend in found}
    for backend, results in found.items():
        counts = Counter(results.values())
        line = ", ".join(f"{counts[each]} {each}" for each in ("passed", "failed", "skipped"))
        backends = [text for text in made[backend] if text.startswith("storage backends made")]
        sys.stdout.write(f"{backend:6} {line}; {''.join(backends)}\n")
    differing = [
        f"{test}: file {found['file'].get(test)}, kvass {found['kvass'].get(test)}"
        for test in sorted({*found["file"], *found["kvass"]})
        if found["file"].get(test) != found["kvass"].get(test)
    ]
    sys.stdout.write(("\n".join(differing) or "no test has another result") + "\n")
    return 1 if differing else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
