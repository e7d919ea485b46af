"""What a token takes in L1, by the kinds of its model's layers, from a daemon's status."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from kvass.kinds import KINDS
from kvass.types import Size


def token_kinds(namespace: Mapping[str, Any]) -> list[str]:
    """What a token of a model takes, by kind, where it has a row. Windows and states are not stored
    with each chunk: what is stored of them, for each token that has full attention."""
    chunk_tokens = max(1, namespace.get("chunk_tokens", 1))
    row, used, tokens = defaultdict[str, int](int), defaultdict[str, int](int), 0
    for group in namespace["groups"]:
        kind = KINDS.get(group["kind"])
        name = group["kind"] if kind is None else kind.called
        row[name] += group["row_bytes"]
        if kind is None or not kind.whole:
            used[name] += group["used_bytes"]
        else:
            tokens = max(tokens, group["rows"] * chunk_tokens)
    return [
        f"{name} {Size(size // chunk_tokens).rounded()}"
        + (f" (stored: {Size(used[name] // tokens).rounded()})" if tokens and name in used else "")
        for name, size in row.items()
    ]
