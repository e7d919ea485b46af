"""The tables of the docs site that are generated from the code.

A page of ``docs/`` has a mark where a table belongs, ``<!-- table: NAME -->``. ``make docs``
replaces the marks (``docs/conf.py``), so these tables are not in the repository.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Final, NoReturn, get_args
from unittest import mock

from kvass.cli.main import COMMANDS
from kvass.config import Parser, add_flags
from kvass.core import metrics
from kvass.daemon.live import LIVE
from kvass.errors import ErrorCode
from tests.simulation import mutants

CODES: Final = get_args(ErrorCode)
MARK: Final = re.compile(r"^<!-- table: (\w+) -->\n", re.MULTILINE)


class _Found(Exception):
    """Carries a command's parser out of the command."""


def parser_of(command: str) -> Parser:
    """The parser that a command makes for itself."""

    def found(self: Parser, *_: object) -> NoReturn:
        raise _Found(self)

    with mock.patch.object(Parser, "parse_known_args", found):
        try:
            import_module(f"kvass.cli.{command}").run([])
        except _Found as caught:
            parser: Parser = caught.args[0]
            return parser
    raise AssertionError(f"{command} parses nothing")


def flags_of(parser: argparse.ArgumentParser) -> Iterator[Any]:
    """Its flags, but for ``--help`` and hidden ones."""
    hidden = (argparse.SUPPRESS, "show this help message and exit")
    yield from (a for a in parser._actions if a.option_strings and a.help not in hidden)


def options() -> Iterator[str]:
    """A row per option of the daemon."""
    parser = Parser()
    add_flags(parser)
    yield "| flag | environment | default | | meaning |\n|---|---|---|---|---|\n"
    for action in flags_of(parser):
        flag, name = action.option_strings[0], action.dest
        meaning, _, default = str(action.help).replace("%%", "%").rpartition(" (default: ")
        live = "SIGHUP" if name in LIVE else ""
        value = action.metavar.replace("|", "\\|")
        cells = f"`{flag} {value}`", f"`KVASS_{name.upper()}`", default[:-1], live, meaning
        yield f"| {' | '.join(cells)} |\n"


def commands() -> Iterator[str]:
    """A section per command, with the flags that are no options of the daemon."""
    parser = Parser()
    add_flags(parser)
    known = {action.help for action in flags_of(parser)}
    for command, about in COMMANDS.items():
        flags = list(flags_of(parser_of(command)))
        shared = [a.option_strings[0] for a in flags if a.help in known]
        also = "all" if command in ("serve", "run") else ", ".join(f"`{f}`" for f in shared)
        yield f"### `kvass {command}`\n\n{about[0].upper()}{about[1:]}."
        yield f" Options of the daemon: {also}.\n\n" if shared else "\n\n"
        own = [a for a in flags if a.help not in known and a.dest != "child"]
        if own:
            yield "| flag | meaning |\n|---|---|\n"
            for a in own:
                value = f" {a.metavar}" if a.metavar else ""
                yield f"| `{a.option_strings[0]}{value}` | {a.help} |\n"
            yield "\n"


def fields() -> Iterator[str]:
    """A table per table of the status."""
    tables = {
        "The daemon": metrics.GAUGES,
        "`counters`": metrics.COUNTERS,
        "Each of `tiers`": metrics.TIER_GAUGES | metrics.TIER_COUNTERS,
        "Each of `namespaces`": metrics.NAMESPACE_GAUGES | metrics.NAMESPACE_COUNTERS,
        "`shadow` of each of `namespaces` and `engines`": metrics.SHADOW,
        "Each of a namespace's `groups`": metrics.GROUP_GAUGES,
        "Each of `tenants`": metrics.TENANT_GAUGES
        | metrics.TENANT_COUNTERS
        | metrics.TENANT_MISSES,
        "Each of `engines`": metrics.ENGINE_FIELDS,
    }
    for title, table in tables.items():
        yield f"### {title}\n\n| field | meaning |\n|---|---|\n"
        coded = tuple(f"{kind}_{code}" for kind in ("refused", "ended") for code in CODES)
        rows = {name: text for name, text in table.items() if name not in coded}
        if table is metrics.COUNTERS:
            codes = ", ".join(f"`{code}`" for code in CODES)
            rows["refused_CODE"] = f"Requests refused with a code, each of {codes}."
            rows["ended_CODE"] = "Sessions ended with that code."
        yield from (f"| `{name}` | {text} |\n" for name, text in rows.items())
        yield "\n"


def breaks() -> Iterator[str]:
    """A row per break of the core."""
    noticed = mutants.noticed()
    yield "| break | law | first noticed by |\n|---|---|---|\n"
    for mutant in mutants.MUTANTS:
        yield f"| {mutant.name} | {mutant.law} | {noticed.get(mutant.name, 'not judged yet')} |\n"


TABLES: Final[dict[str, Callable[[], Iterator[str]]]] = {
    "options": options,
    "commands": commands,
    "fields": fields,
    "breaks": breaks,
}


def fill(text: str) -> str:
    """A page with the tables that its marks name."""
    return MARK.sub(lambda mark: "".join(TABLES[mark[1]]()).rstrip() + "\n", text)
