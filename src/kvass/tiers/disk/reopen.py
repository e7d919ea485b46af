"""What an earlier life left in the disk tier's folder, when it is opened again.

Only files with names of ours are touched, and only while we hold the folder's lock.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from itertools import accumulate
from typing import Final

from kvass.errors import ConfigError
from kvass.tiers.disk.folder import Folder
from kvass.tiers.disk.segment import SEGMENT, TABLE, SegmentFile
from kvass.types import Size

_NAME: Final = re.compile(f"([0-9a-f]{{8}})({re.escape(SEGMENT)}|{re.escape(TABLE)})")


def check_capacity(folder: Folder, capacity: int) -> None:
    """Raise ``ConfigError`` for a capacity that this disk does not have."""
    disk = os.statvfs(folder.fd)
    size = disk.f_blocks * disk.f_frsize
    if capacity > size:
        raise ConfigError(
            f"{folder.path}: a capacity of {Size(capacity)}, but the disk has {Size(size)}; "
            "choose less"
        )


def reopen_segments(folder: Folder, capacity: int, direct: bool) -> tuple[list[SegmentFile], int]:
    """The segments of earlier lives, newest first, and the highest number ever used.

    Damaged ones are removed, and the oldest ones beyond ``capacity``. Raises ``ConfigError`` for a
    format newer than ours, having removed nothing, and for what the disk refuses.
    """
    numbers: set[int] = set()
    opened: list[SegmentFile] = []
    try:
        for name in folder.names():
            if match := _NAME.fullmatch(name):
                numbers.add(int(match[1], 16))
        for number in sorted(numbers, reverse=True):
            with suppress(FileNotFoundError):  # a table whose segment is gone
                if (file := SegmentFile.reopen(folder, number, direct)) is not None:
                    opened.append(file)
        totals = accumulate(file.bytes for file in opened)
        kept = [file for file, total in zip(opened, totals, strict=True) if total <= capacity]
        for number in numbers - {file.number for file in kept}:
            for suffix in (SEGMENT, TABLE):
                folder.unlink(f"{number:08x}{suffix}")
    except (OSError, ConfigError) as error:
        for file in opened:
            file.close()
        if isinstance(error, ConfigError):
            raise
        where = f"{error.filename}: " if error.filename else ""
        raise ConfigError(f"{folder.path}: {where}{error.strerror}") from error
    for file in opened[len(kept) :]:
        file.close()
    return kept, max(numbers, default=0)
