"""``kvass status``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any, Final

from kvass.client.client import Client
from kvass.config import Parser, add_flags, load

_UNITS: Final = (("B", 1), ("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30))


def run(argv: list[str]) -> int:
    """Print what the daemon holds. Raises ``Unavailable`` if there is none."""
    parser = Parser(prog="kvass status", description="Show what a daemon holds.")
    add_flags(parser, "socket")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = vars(parser.parse_args(argv))
    as_json = options.pop("json")
    with Client(load(options, os.environ).socket) as client:
        fields = client.status()
    print(json.dumps(fields, indent=2) if as_json else "\n".join(table(fields)))
    return 0


def table(fields: dict[str, Any], indent: str = "") -> Iterator[str]:
    """Lines of ``name  value``; what is nested stands indented under its name."""
    width = max(
        (len(name) for name, value in fields.items() if not _nested(name, value)), default=0
    )
    for name, value in fields.items():
        if not (nested := _nested(name, value)):
            yield f"{indent}{name:<{width}}  {_shown(name, value)}"
            continue
        yield indent + name
        for title, inner in nested.items():
            if title:
                yield f"{indent}  {title}"
            yield from table(inner, indent + ("    " if title else "  "))


def _nested(name: str, value: Any) -> dict[str, dict[str, Any]]:
    """Tables inside ``value``, by title."""
    if isinstance(value, dict):
        return {"": value}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {f"{name.removesuffix('s')} {i}": item for i, item in enumerate(value)}
    return {}


def _shown(name: str, value: Any) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        unit, size = max((u for u in _UNITS if u[1] <= max(value, 1)), key=lambda u: u[1])
        return f"{value:>15,}  {value / size:>7,.1f} {unit}"
    return f"{value:>15,}" if isinstance(value, int) else str(value)
