"""The seal of a row: a checksum in its record that says that its bytes are complete.

Law of this file: a READY record with a valid seal names complete bytes (law 13).
``RowTable.move`` makes the record READY and then writes the seal, after all that the seal covers.
When the row is freed its state changes before its slot can be given to anybody, and the record is
one cache line, so nothing has to void the seal then.

A seal covers the key, the number of the row and the serial of its extent set. A set gets a new
serial when it is added or when its rows are about to be cleared, so all seals of before are void at
once. A seal is no secret: it finds half-written and damaged records, but no forger.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvass.types import I64Array, U64Array

VOID: Final = 0
"""What a record has that is not sealed. No seal has this value."""
_KEY: Final = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64
)
_ROW: Final = np.uint64(0xFF51AFD7ED558CCD)
_SERIAL: Final = np.uint64(0xC4CEB9FE1A85EC53)
_FOLD: Final = np.uint64(29)
_ONE: Final = np.uint64(1)


def seals(keys: U64Array, rows: I64Array, serials: U64Array) -> I64Array:
    """The seals of ``rows``, which have these ``keys`` and whose sets have these ``serials``."""
    mixed: U64Array = keys.dot(_KEY)
    mixed += rows.view(np.uint64) * _ROW  # in place: a store pays for each temporary array
    mixed ^= serials
    mixed *= _SERIAL
    mixed ^= mixed >> _FOLD
    mixed *= _ROW
    mixed |= _ONE
    return mixed.view(np.int64)
