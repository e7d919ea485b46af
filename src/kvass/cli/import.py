"""The command ``kvass import``: stores what ``kvass export`` wrote, from standard input."""  # noqa: N999

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

from kvass.cli import daemon
from kvass.cli.compare import CHARS, LAYOUT, MOST, Terms, differing
from kvass.cli.export import add_carrying, encryption_of
from kvass.client.carried_file import CarryError, Reader, What
from kvass.client.carrying import RowClient, import_rows
from kvass.client.client import Client
from kvass.errors import ConfigError
from kvass.types import printable

_SHOWN: Final = 4
"""The most fields that a refusal shows with their values."""
_VALUE: Final = 60
_ABOUT = """Store the rows that `kvass export` wrote, from standard input. They are checked one by
one. Engines hit them if all their fields are those of the engine that stored them."""


def run(argv: list[str]) -> int:
    """Import a session. Raises ``ConfigError``, ``CarryError``, ``Unavailable``, ``Refused``,
    ``Incompatible``."""
    parser = daemon.parser_of("import", _ABOUT)
    parser.add_argument(
        "--session", metavar="NAME", default="", help="its name here (default: that of the file)"
    )
    parser.add_argument(
        "--ahead",
        action="store_true",
        help="store them, though no engine with these fields has connected to this daemon yet",
    )
    add_carrying(parser)
    own, named = daemon.parse(parser, argv)
    if sys.stdin.isatty():
        raise ConfigError("standard input is a terminal: write `kvass import ... < FILE`")
    reader = Reader(sys.stdin.buffer, encryption_of(own))
    what, session = reader.what, own.session or reader.what.session
    with daemon.client(named) as client:
        if not own.ahead:
            check_known(client, what)
        place = daemon.place(named)
        with RowClient(place.socket, what, place.daemon_uid) as rows:
            done = import_rows(rows, reader, session, own.tenant)
    of, tokens = done.chunk_tokens, done.chunks * done.chunk_tokens
    there = f"; {done.held:,} were here" if done.held else ""
    say = f"{done.hit_chunks * of} of {tokens} tokens can be hit ({done.rows:,} rows{there})"
    print(f"{printable(session)}: {say}")
    return 0


def check_known(client: Client, what: What) -> None:
    """Raise ``CarryError`` unless an engine of the file's namespace has connected to the daemon.
    It names the fields in which the nearest namespace differs."""
    fields = client.status()
    known = [ns["namespace"] for ns in fields["namespaces"]]
    if what.namespace.hex() in known:
        return
    nearest = _nearest(client, fields, what)
    if nearest is None:
        raise CarryError(
            f"no engine has connected to this daemon yet, so nobody may ever hit rows of "
            f"{printable(what.engine.model) or '?'}: start the engine first, or give --ahead"
        )
    name, terms = nearest
    names = differing(what.terms, terms)
    shown = [
        f"{field} (file: {_value(what.terms, field)}; here: {_value(terms, field)})"
        for field in names[:_SHOWN]
    ]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    raise CarryError(
        f"no engine here shares these rows. Namespace {name[:CHARS]} differs in "
        f"{', '.join(shown) or LAYOUT}{more}; give --ahead to store them for engines to come"
    )


def _nearest(client: Client, fields: Mapping[str, Any], what: What) -> tuple[str, Terms] | None:
    """The namespace that differs least from that of the file, and its fields."""
    every = fields["namespaces"]
    every = sorted(every, key=lambda ns: ns["model"] != what.engine.model)[:MOST]  # stable
    shown = client.status(terms_of=[ns["namespace"] for ns in every])["namespaces"]
    terms = [(ns["namespace"], ns["terms"]) for ns in shown if "terms" in ns]
    return min(terms, key=lambda one: len(differing(what.terms, one[1])), default=None)


def _value(terms: Terms, field: str) -> str:
    value = printable(terms.get(field, "(absent)"))
    return value if len(value) <= _VALUE else f"{value[:_VALUE]}..."
