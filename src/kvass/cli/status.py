"""The command ``kvass status``: shows whether a daemon works, and what it saves."""

from __future__ import annotations

import json

from kvass.cli import daemon
from kvass.cli.detail import detail
from kvass.cli.report import report
from kvass.client.health import notes, troubles
from kvass.types import printable


def run(argv: list[str]) -> int:
    """Print the status of the daemon. Raises ``Unavailable`` if there is none."""
    parser = daemon.parser_of("status", "Show whether a daemon works, and what it saves.")
    parser.add_argument("--json", action="store_true", help="print all fields as JSON")
    parser.add_argument(
        "--verbose", action="store_true", help="print also each figure that is not 0, explained"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="print what is wrong, and notes; exit status 1 if something is wrong",
    )
    own, named = daemon.parse(parser, argv)
    with daemon.client(named) as client:
        fields = client.status()
    if own.check:
        lines = troubles(fields)
        said = [*(lines or ["ok"]), *(f"note: {line}" for line in notes(fields))]
        print("\n".join(map(printable, said)))
        return 1 if lines else 0
    if own.json:
        print(json.dumps(fields, indent=2))
    else:
        print("\n".join([*report(fields), *(detail(fields) if own.verbose else ())]))
    return 0
