"""Canonical texts for the fields of an engine's identity: all that changes the bytes of a KV page.

The same model and settings give the same text in every process. What differs between processes
(addresses, the order of sets, ``hash()``) is never part of a text. A value that cannot be described
is refused, not left out.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any, Final

import msgspec

from kvass.errors import UsageError

MAX_TEXT: Final = 256
"""The most characters of a field of an identity."""
PREFIX: Final = 128
"""How many characters of a longer text are kept."""


class Indescribable(UsageError):
    """A setting that cannot be described by a text that is the same in every process."""


def canonical(value: object, field: str = "value") -> str:
    """``value`` as JSON. Keys and sets are sorted, data objects are written as their fields, and
    functions and classes of a module as their qualified names. Raises :class:`Indescribable` for
    anything else, for example a lambda. ``field``: the name of ``value`` in the error."""
    return json.dumps(_plain(value, field), sort_keys=True, separators=(",", ":"))


def digest(parts: Iterable[str]) -> str:
    """The SHA-256 of ``parts``, in hex. Each part has its length as prefix, so different lists have
    different digests."""
    state = hashlib.sha256()
    for part in parts:
        raw = part.encode(errors="surrogatepass")
        state.update(len(raw).to_bytes(8, "little") + raw)
    return state.hexdigest()


def short(text: str) -> str:
    """``text`` as a field of an identity. A long text is cut, and its digest is appended."""
    return text if len(text) <= MAX_TEXT else f"{text[:PREFIX]}... sha256:{digest([text])}"


def _plain(value: object, field: str) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    # An engine without torch has no torch.dtype, so torch is not imported for this.
    is_dtype = (type(value).__module__, type(value).__name__) == ("torch", "dtype")
    if is_dtype or isinstance(value, Fraction):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(item, f"{field}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, set | frozenset):
        return sorted(canonical(item, field) for item in value)
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {
            str(_plain(key, field)): _plain(item, f"{field}.{key}") for key, item in value.items()
        }
    return _name(value, field)


def _name(value: object, field: str) -> str:
    """The qualified name by which any process can import ``value``."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    found: object = sys.modules.get(str(module), None)
    for part in str(name).split("."):
        found = getattr(found, part, None)
    if found is not value or module == "__main__":
        raise Indescribable(
            f"{field}: this {type(value).__name__} has no name in another process; "
            "use plain data, or a function or class at the top of an importable module"
        )
    return f"{module}.{name}"
