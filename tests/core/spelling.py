"""Words of scripts, and the values of messages and of the status that they stand for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import inspect

from kvass import messages as m
from kvass.types import NO_CAP, PAGE, GroupLayout, Quota, RankLayout
from tests.core.rig import WIDTH, digests, key

BLOCKS: Final = 4
"""Blocks of a chunk of a prompt of letters."""


def hashed(text: str) -> str:
    return blake2b(text.encode(), digest_size=WIDTH // 2).hexdigest()


class Prompt:
    """A prompt of single letters, one a block. A hash names all letters up to its block."""

    def __init__(self, text: str) -> None:
        every = [text[: i + 1] for i in range(len(text))]
        self.hashes = [one if len(one) <= WIDTH else hashed(one) for one in every]
        whole = len(text) // BLOCKS * BLOCKS
        self.chunks, self.rest = self.hashes[BLOCKS - 1 : whole : BLOCKS], self.hashes[whole:]


def ranges(found: Iterable[str]) -> str:
    """Names, three or more that follow each other as ``f0..f9``."""
    runs: list[list[str]] = []
    for name in found:
        stem, number = re.fullmatch(r"(.*?)(\d*)", name).groups()  # type: ignore[union-attr]
        if runs and number and runs[-1][-1] == f"{stem}{int(number) - 1}":
            runs[-1].append(name)
        else:
            runs.append([name])
    return " ".join(f"{r[0]}..{r[-1]}" if len(r) > 2 else " ".join(r) for r in runs)


def alike(one: str, other: str) -> bool:
    """Whether two words are the same, or names with the same letters."""
    return one == other or bool(
        re.fullmatch(r"[a-su-z]+\d+,?", one) and re.sub(r"\d", "", one) == re.sub(r"\d", "", other)
    )


def joined(words: tuple[str, ...]) -> str:
    return words[0] if len({*words}) == 1 else ranges(words)


def spelled(words: Iterable[str]) -> Iterator[str]:
    """``f0..f9`` is ten names."""
    for word in words:
        if run := re.fullmatch(r"(\D*)(\d+)\.\.\1(\d+)", word):
            yield from (f"{run[1]}{i}" for i in range(int(run[2]), int(run[3]) + 1))
        else:
            yield word


def named(blob: bytes) -> list[str]:
    return [
        blob[i : i + WIDTH].rstrip(b"\0").decode(errors="replace")
        for i in range(0, len(blob), WIDTH)
    ]


def tokens(chunks: Iterable[str]) -> bytes:
    """16 tokens for each chunk, which follow from its name."""
    return b"".join(
        (np.arange(16) + int.from_bytes(key(name)[:3], "big")).astype("<u4").tobytes()
        for name in chunks
    )


def quota(text: str) -> Quota:
    """``NAME:CAP:RESERVED`` in pages; what is left out is no cap and nothing."""
    name, cap, reserved = (*text.split(":"), "", "")[:3]
    return Quota(name, int(cap) * PAGE if cap else NO_CAP, int(reserved or 0) * PAGE)


def groups(text: str) -> RankLayout:
    """``full``, ``window/20``, ``local/24``, ``state``; ``*2``: pages of a chunk of 16 tokens
    (0: the rank has no layer of it); ``@4``: tokens of a block. Several: with commas."""
    kinds: Any = {"window": "sliding_window", "local": "chunked_local"}
    found = [re.fullmatch(r"(\w+)(?:/(-?\d+))?(?:\*(\d+))?(?:@(\d+))?", g) for g in text.split(",")]
    made = []
    for each in filter(None, found):
        kind, window, block = kinds.get(each[1], each[1]), int(each[2] or 0), int(each[4] or 16)
        pages = int(each[3] or 1)
        layers, sizes = ("a",) * bool(pages), (pages * PAGE * block // 16,) * bool(pages)
        made.append(GroupLayout(kind, block, layers, sizes, window))
    return RankLayout(tuple(made))


def typed(kind: inspect.Type, text: str) -> Any:
    """The value of a field."""
    match kind:
        case inspect.IntType():
            return int(text, 0)
        case inspect.FloatType():
            return float(text)
        case inspect.BoolType():
            return text == "yes"
        case inspect.BytesType():
            return times(text).encode()
        case inspect.VarTupleType():
            return tuple(typed(kind.item_type, each) for each in spelled(text.split(",")) if each)
        case inspect.UnionType() if text == "none":
            return None
        case inspect.UnionType():
            return typed(next(t for t in kind.types if not isinstance(t, inspect.NoneType)), text)
        case inspect.StructType() if kind.cls is Quota:
            return quota(text)
        case inspect.StructType() if kind.cls is RankLayout:
            return groups(text)
        case inspect.StructType():
            types = {field.name: field.type for field in kind.fields}
            fields = (each.split(":") for each in text.split("/"))
            return kind.cls(**{name: typed(types[name], value) for name, value in fields})
        case inspect.DictType():
            return dict(times(each).split(":") for each in text.split(",") if each)
    return times(text)


def times(text: str) -> str:
    """``x*3`` is ``xxx``."""
    found = re.fullmatch(r"(.*)(.)\*(\d+)", text)
    return found[1] + found[2] * int(found[3]) if found else text


def chunks_of(words: list[str], kind: Any, given: dict[str, Any]) -> dict[str, Any]:
    """``given`` with the digests of chunks; a prompt of letters in quotes has blocks, too."""
    if not words[0].startswith('"'):
        return {"digests": digests(*words)} | given
    prompt = Prompt(words[0].strip('"'))
    rest = prompt.rest
    begin = given.get("first", 0) * BLOCKS
    if kind is m.ReserveItem:
        rest = prompt.hashes[begin:]
    if first := given.get("first_blocks"):
        given["first_blocks"] = digests(*Prompt(first.decode()).hashes[begin:])
    return {"digests": digests(*prompt.chunks), "blocks": digests(*rest)} | given


def plainly(text: str) -> Any:
    try:
        return {"yes": True, "no": False}[text] if text in ("yes", "no") else int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def plain(reply: Any) -> str:
    """A message with those of its fields that have a value."""
    text = type(reply).__name__
    for field in reply.__struct_fields__:
        value = getattr(reply, field)
        if field not in ("seq", "boot") and value:
            text += f" {field}={shown(value)}" if value is not True else f" {field}"
    return text


def shown(value: Any) -> str:
    match value:
        case bytes() if len(value) % WIDTH == 0 and max(value, default=0) > 1:
            return ranges(named(value))
        case bytes():
            return " ".join(map(str, value))
        case dict():
            return " ".join(f"{k} {shown(v)}" for k, v in value.items() if v) or "none"
        case list() | tuple():
            return ", ".join(map(shown, value)) or "none"
        case float():
            return f"{value:g}"
        case bool() | None:
            return {True: "yes", False: "no", None: "unknown"}[value]
        case msgspec.Struct():
            return plain(value)
    return str(value) or "none"
