"""``kvass status`` and ``kvass clear``: one question, one answer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from kvass.client.client import Client
from kvass.config import load


def status(options: dict[str, Any]) -> int:
    """Print what the daemon holds. Raises ``Unavailable`` if there is none."""
    as_json = options.pop("json")
    with Client(load(options, os.environ).socket) as client:
        fields = client.status()
    print(json.dumps(fields, indent=2) if as_json else "\n".join(table(fields)))
    return 0


def clear(options: dict[str, Any]) -> int:
    """Make the daemon forget all rows. Raises ``Unavailable`` if there is none."""
    with Client(load(options, os.environ).socket) as client:
        rows = client.clear(everything=True)
    print(f"cleared {rows} rows")
    return 0


def table(fields: dict[str, Any], indent: str = "") -> Iterator[str]:
    """Lines of ``name  value``, nested ones under their name."""
    width = max((len(name) for name in fields), default=0)
    for name, value in fields.items():
        nested = value if isinstance(value, dict) else None
        if isinstance(value, list) and value and isinstance(value[0], dict):
            nested = {f"{name} {i}": item for i, item in enumerate(value)}
            yield from table(nested, indent)
        elif nested:
            yield f"{indent}{name}"
            yield from table(nested, indent + "  ")
        else:
            yield f"{indent}{name:<{width}}  {_shown(name, value)}"


def _shown(name: str, value: Any) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value:>15,}  ({value / 2**20:,.1f} MiB)"
    return f"{value:>15,}" if isinstance(value, int) else str(value)
