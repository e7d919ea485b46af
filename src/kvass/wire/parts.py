"""How many parts a MessagePack value has, without decoding it: what strings hold is skipped.

To decode a part takes some 10 ns to 100 ns, whatever it is, also where a message says a field again
and again, or fields that nobody knows. So their number says how long a frame takes.
"""

from __future__ import annotations

from typing import Final

_HEADS: Final[list[tuple[int, int, int]]] = []
"""By the first byte of a value: its bytes without what it counts; how many of them are a count;
and what is counted: 0: nothing, or bytes; 1: values of an array; 2: pairs of a map."""


def _heads() -> list[tuple[int, int, int]]:
    heads = [(1, 0, 0)] * 256  # small integers, nil, booleans
    for byte in range(0x80, 0x90):
        heads[byte] = (1, 0, 2)
    for byte in range(0x90, 0xA0):
        heads[byte] = (1, 0, 1)
    for byte in range(0xA0, 0xC0):
        heads[byte] = (1 + byte - 0xA0, 0, 0)
    for byte, size in zip(range(0xC4, 0xC7), (1, 2, 4), strict=True):
        heads[byte], heads[byte + 3], heads[byte + 0x15] = (1, size, 0), (2, size, 0), (1, size, 0)
    for byte, size in zip(range(0xCA, 0xD4), (4, 8, 1, 2, 4, 8, 1, 2, 4, 8), strict=True):
        heads[byte] = (1 + size, 0, 0)
    for byte, size in zip(range(0xD4, 0xD9), (1, 2, 4, 8, 16), strict=True):
        heads[byte] = (2 + size, 0, 0)
    for byte, size in ((0xDC, 2), (0xDD, 4)):
        heads[byte], heads[byte + 2] = (1, size, 1), (1, size, 2)
    return heads


def has_more_parts(payload: memoryview, most: int) -> bool:
    """Whether the value in ``payload`` has more than ``most`` parts. In bytes that
    are no MessagePack, the parts before the fault are counted."""
    heads, end = _HEADS, len(payload)
    at, left, seen = 0, 1, 0
    while left and at < end:
        byte = payload[at]
        size, count_bytes, kind = heads[byte]
        left, seen = left - 1, seen + 1
        if seen > most:
            return True
        count = byte & 0x0F
        if count_bytes:
            count = int.from_bytes(payload[at + 1 : at + 1 + count_bytes], "big")
            size += count_bytes + (count if kind == 0 else 0)
        left += kind * count
        at += size
        if seen + left > most:
            return True
    return False


_HEADS.extend(_heads())
