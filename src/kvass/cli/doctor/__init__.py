"""The command ``kvass doctor``: what this machine has, what kvass will use of it, what that costs.

The exit status is 1 if any finding is an error: kvass cannot serve here.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final

from kvass._version import __version__
from kvass.cli.daemon import add_daemon
from kvass.cli.doctor.checks import CHECKS
from kvass.cli.doctor.finding import Finding
from kvass.cli.doctor.machine import examine
from kvass.config import CONNECTION, Parser, add_flags, load
from kvass.wire.places import likely_socket

USED: Final = (*CONNECTION, "l1_size", "force_l1_size", "huge_pages", "arena")
"""The options that are looked at. The environment may be that of a daemon elsewhere."""


def run(argv: list[str]) -> int:
    """Examine the machine, and print the findings. Raises ``ConfigError`` for options of no
    meaning."""
    parser = Parser(
        prog="kvass doctor",
        description="Check what this machine can serve. Run it as the user, in the container and "
        "with the environment of the daemon, or of an engine.",
    )
    add_flags(parser, "l1_size", "huge_pages")
    add_daemon(parser)
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="the folder of the engine's model: its weights count beside L1",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = vars(parser.parse_args(argv))
    as_json, model = options.pop("json"), options.pop("model")
    config = load(options, os.environ, wanted=USED)
    path = config.socket or likely_socket()
    machine = examine(config, path, os.environ, model)
    findings = {name: check(machine) for name, check in CHECKS.items()}
    serves = all(finding.level != "error" for finding in findings.values())
    if as_json:
        shown = [{"name": name} | asdict(finding) for name, finding in findings.items()]
        print(json.dumps({"version": __version__, "serves": serves, "findings": shown}, indent=2))
    else:
        print("\n".join(table(findings)))
    return 0 if serves else 1


def table(findings: Mapping[str, Finding]) -> Iterator[str]:
    """A line per finding, and below it the indented lines of what is used, its cost, and what to
    do."""
    width = max(map(len, findings))
    for name, finding in findings.items():
        yield f"{finding.level:<8} {name:<{width}}  {finding.found}"
        for label in ("used", "cost", "do"):
            if text := getattr(finding, label):
                yield f"{'':<8} {'':<{width}}    {label + ':':<5} {text}"
    count = Counter(finding.level for finding in findings.values())
    seen = ", ".join(f"{count[level]} {level}" for level in ("error", "warning", "note"))
    verb = "cannot" if count["error"] else "can"
    yield f"kvass {__version__} {verb} serve here: {seen}"
