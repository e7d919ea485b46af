"""Huge pages that root has reserved (hugetlb): how many there are, and how to reserve more.

``root`` is the folder that has sys. Files that cannot be read are as if they had a 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, NamedTuple

from kvass.types import PAGE, Size

HugePages = Literal["transparent", "2MiB", "1GiB"]
"""The option ``huge_pages``. ``transparent``: pages of ``PAGE`` that the kernel may join."""
BOOT_ONLY: Final = 1 << 30
"""From this size on the kernel seldom finds pages after the machine has started."""
_ROOT: Final = Path("/")
_FOLDER: Final = "sys/kernel/mm/hugepages/hugepages-{}kB"


class Pool(NamedTuple):
    """Numbers of huge pages of one size in this machine. ``free``: those that nobody has been
    promised."""

    total: int
    free: int


def page_bytes(option: HugePages) -> int:
    """The size of the arena's pages."""
    return PAGE if option == "transparent" else Size.parse(option)


def pool(page: int, root: Path = _ROOT) -> Pool:
    """The huge pages of ``page`` bytes."""
    folder = root / _FOLDER.format(page >> 10)
    names = ("nr_hugepages", "free_hugepages", "resv_hugepages")
    total, free, promised = (_number(folder / name) for name in names)
    return Pool(total, max(0, free - promised))


def lacking(page: int, size: int, root: Path = _ROOT) -> str:
    """Why an arena of ``size`` bytes cannot have pages of ``page`` bytes, and what to do; empty if
    enough of them are free."""
    there, needed = pool(page, root), -(-size // page)
    if there.free >= needed:
        return ""
    total, file = there.total + needed - there.free, f"/{_FOLDER.format(page >> 10)}/nr_hugepages"
    boot = f", or at boot: hugepagesz=1G hugepages={total}" if page >= BOOT_ONLY else ""
    name = Size(page).rounded()
    return (
        f"of {needed} pages of {name} only {there.free} are free: as root, "
        f"echo {total} > {file}{boot}"
    )


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
