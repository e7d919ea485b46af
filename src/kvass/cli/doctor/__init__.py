"""``kvass doctor``: what kvass finds on this machine, what it will use, what that costs.

Law of this file: it looks, and says what it saw; the exit status is 1 if kvass cannot serve here.
``machine`` looks, ``findings`` and ``gpu`` judge.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvass._version import __version__
from kvass.cli.doctor.findings import INSTALLED, SERVING, Finding
from kvass.cli.doctor.gpu import GPUS
from kvass.cli.doctor.machine import Machine, examine
from kvass.config import Parser, Size, add_flags, default_socket, load, memory_bytes
from kvass.errors import ConfigError
from kvass.wire.framing import one_line


def run(argv: list[str]) -> int:
    """Look, and print what was seen. Raises ``ConfigError`` for a flag that is none."""
    parser = Parser(
        prog="kvass doctor",
        description="Show what kvass finds on this machine, as whoever asks: ask as the user, in "
        "the container and with the environment of the daemon, or of an engine.",
    )
    add_flags(parser, "l1_size", "socket")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = vars(parser.parse_args(argv))
    as_json = options.pop("json")
    size, socket, error = wanted(options, os.environ)
    found = diagnose(examine(size, socket, os.environ, error))
    print(json.dumps(report(found), indent=2) if as_json else "\n".join(table(found)))
    return 0 if serves(found) else 1


def wanted(
    options: Mapping[str, str | None], environment: Mapping[str, str]
) -> tuple[int, str, str]:
    """Size and socket that ``kvass serve`` would be given, and why it would refuse them.

    That it would is a finding, so that all else is looked at too; but a flag that is no size
    raises ``ConfigError``.
    """
    try:
        given = options["l1_size"] and Size.parse(options["l1_size"])
    except ValueError as error:
        raise ConfigError(f"--l1-size: {error}") from error
    try:
        config = load(options, environment)
    except ConfigError as error:
        socket = options["socket"] or environment.get("KVASS_SOCKET") or default_socket()
        return given or memory_bytes() // 4, socket, one_line(str(error))
    return config.l1_size, config.socket, ""


def diagnose(machine: Machine) -> list[Finding]:
    """All findings."""
    return [judge(machine) for judge in (*SERVING, *GPUS, *INSTALLED)]


def serves(findings: Sequence[Finding]) -> bool:
    """Whether a daemon can serve here."""
    return all(finding.level != "error" for finding in findings)


def report(findings: Sequence[Finding]) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "version": __version__,
        "serves": serves(findings),
        "findings": [asdict(finding) for finding in findings],
    }


def table(findings: Sequence[Finding]) -> Iterator[str]:
    """Everything, for people: a line per finding, and what follows from it indented below."""
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        yield f"{finding.level:<8} {finding.name:<{width}}  {finding.found}"
        for label in ("used", "cost", "do"):
            if text := getattr(finding, label):
                yield f"{'':<8} {'':<{width}}    {label + ':':<5} {text}"
    count = Counter(finding.level for finding in findings)
    seen = ", ".join(f"{count[level]} {level}" for level in ("error", "warning", "note"))
    yield f"kvass {__version__} {'can' if serves(findings) else 'cannot'} serve here: {seen}"
