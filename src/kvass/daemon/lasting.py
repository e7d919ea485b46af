"""The memory of L1: of this process alone, or of a place that outlives it (``--arena``).

Law of this file: the rows of a former daemon are used only if the index beside them is usable.
Otherwise slots and index are replaced by new ones, because an engine of that time may still write
to the old ones (law 3).
"""

from __future__ import annotations

import logging
import uuid
from pathlib import Path
from typing import Final

from kvass.arena import huge, memory
from kvass.arena.huge import HugePages
from kvass.arena.memory import Arena
from kvass.arena.place import Place, folder_page_bytes, open_place
from kvass.core.saved.index_file import SavedIndex, Unusable, Where, index_bytes
from kvass.daemon.peer_process import former_processes
from kvass.errors import ConfigError
from kvass.types import PAGE, Size, align_up

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_PIDS: Final = Path("/proc/self/ns/pid")
_log: Final = logging.getLogger("kvass")


class L1Memory:
    """The ``arena`` of a daemon and, if it is in a place, the ``index`` of what is in it.

    ``cold``: why a place had nothing to begin with, or without ``place`` why it is not used; empty
    if there is no reason.
    """

    def __init__(
        self, arena: Arena, place: Place | None, index: SavedIndex | None, cold: str
    ) -> None:
        self.arena, self.place, self.index, self.cold = arena, place, index, cold
        self.former = {} if index is None else former_processes(index)
        """As of ``former_processes``. It comes before the core, which must not wait for the end of
        a process that cannot be seen."""

    @property
    def inherited(self) -> tuple[int, ...]:
        """The descriptors that the processes of tiers must have open."""
        return () if self.place is None else (self.place.lock_fd,)

    def huge(self) -> bool:
        """Ask for huge pages. Returns whether there will be any."""
        return self.arena.advise_huge() if self.place is None else self.place.huge()

    def release(self) -> None:
        """Let another daemon have the place. From now on nothing may be written to it."""
        if self.place is not None:
            self.place.release()


def check_place(path: str, huge_pages: HugePages) -> None:
    """Check what can be checked while another daemon uses the place. Raises ``ConfigError``."""
    if huge.page_bytes(huge_pages) not in (PAGE, page_bytes(path, huge_pages)):
        raise ConfigError(
            f"huge_pages {huge_pages}: not with arena {path}: give a folder of a hugetlbfs with "
            "such pages"
        )


def page_bytes(path: str, huge_pages: HugePages) -> int:
    """The size of the pages of L1."""
    return folder_page_bytes(path) if path else huge.page_bytes(huge_pages)


def open_memory(path: str, size: int, huge_pages: HugePages = "transparent") -> L1Memory:
    """The memory of L1, ``size`` bytes, in the place at ``path``. Empty: of this process alone.
    ``huge_pages`` is about memory that is not in a folder. Raises ``ConfigError``."""
    if not path:
        return L1Memory(_own(size, huge_pages), None, None, "")
    index = _index_bytes(size, page_bytes(path, huge_pages))
    return _lasting(open_place(path, size, index), size)


def _index_bytes(size: int, page_bytes: int) -> int:
    """The size of the index beside slots of ``size`` bytes."""
    return align_up(index_bytes(size), page_bytes)


def _lasting(place: Place, size: int) -> L1Memory:
    """L1 in ``place``, with what is in it if that is usable."""
    where, page = _where(), place.page_bytes
    found: SavedIndex | Unusable
    if place.found == (0, 0):
        found = Unusable("it is new")
    elif _index_bytes(place.found[0], page) != place.found[1]:  # both grow, and never shrink
        found = Unusable("its slots or its index were removed or have another size")
    elif not place.allocate(0, PAGE):  # a read of a page that cannot be had would kill us
        found = Unusable("there is no memory for the index")
    else:
        found = SavedIndex.open(place.index, where, place.allocate, size)
    cold = ""
    if isinstance(found, Unusable):
        cold = found.reason
        if place.found != (0, 0):
            place.renew(size, _index_bytes(size, page))
        found = SavedIndex.create(place.index, where, place.allocate)
    if isinstance(found, Unusable) and page != PAGE:
        place.release()
        what = f"arena {place.name}: {found.reason}"
        raise ConfigError(f"{what}: reserve some pages more than L1 has")
    if isinstance(found, Unusable):
        place.slots.close()
        place.release()
        return L1Memory(_own(size, "transparent"), None, None, found.reason)
    return L1Memory(place.slots, place, found, cold)


def _own(size: int, huge_pages: HugePages) -> Arena:
    page = huge.page_bytes(huge_pages)
    try:
        return memory.create(size, page)
    except OSError as error:
        why = "" if page == PAGE else huge.lacking(page, size)
        said = f"no arena of {Size(size)}: {error.strerror}"
        raise ConfigError(f"huge_pages {huge_pages}: {why}" if why else said) from error


def _where() -> Where:
    try:
        boot_id = uuid.UUID(_BOOT_ID.read_text().strip())
        return Where(boot_id.bytes, _PIDS.stat().st_ino)
    except (OSError, ValueError) as error:
        raise ConfigError(f"arena: /proc does not show the machine's boot id: {error}") from error
