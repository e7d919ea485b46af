"""How large L1 is: what the options say, if the machine has that much memory now.

Law of this file: pages of 4 KiB are promised to L1 only if they are there. The kernel would let a
larger L1 begin, and kill a process in its middle. The operator may force it.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Final, NamedTuple

from msgspec.structs import replace

from kvass.arena.place import held_bytes
from kvass.arena.room import committable, room
from kvass.config import Config, Size, check_quotas, default_l1_size
from kvass.daemon.lasting import page_bytes
from kvass.errors import ConfigError
from kvass.types import PAGE

_UNMAP_S: Final = 5.0
_UNMAP_S_PER_GIB: Final = 0.5
"""How long engines may take to unmap the L1 of a former daemon: 0.1 to 0.3 s per GiB."""
_LONGEST_S: Final = 60.0
_LOOK_S: Final = 0.1
_ROOT: Final = Path("/")
_log: Final = logging.getLogger("kvass")


class L1Size(NamedTuple):
    """The size of L1 in whole pages. ``note``: what the operator must know; empty: nothing."""

    bytes: int
    note: str


def l1_size(config: Config, root: Path = _ROOT) -> L1Size:
    """The size of L1. Waits up to a minute for memory that engines have of a former daemon. Raises
    ``ConfigError`` if there is no memory."""
    page = page_bytes(config.arena, config.huge_pages)
    fit = L1Size(config.l1_size, "") if page > PAGE else _fit(config, root)
    size = fit.bytes // page * page
    if not size:
        raise ConfigError(f"l1_size {config.l1_size}: smaller than a page of {Size(page)}")
    return L1Size(size, fit.note)


def _fit(config: Config, root: Path) -> L1Size:
    asked, held = config.l1_size, held_bytes(config.arena)
    wanted = max(0, asked - held)
    left = committable(root)
    if left is not None and wanted > left:
        raise ConfigError(
            f"l1_size {asked}: the kernel promises {Size(left).rounded()} more at most "
            "(vm.overcommit_memory=2): give less, or raise vm.overcommit_ratio"
        )
    chosen = asked != default_l1_size()
    available, most = _available(wanted, root)
    if wanted <= most:
        return L1Size(asked, "")
    there = f"{Size(available).rounded()} of memory available"
    if held:
        there += f" beside the {Size(held).rounded()} that it has in {config.arena}"
    safe = Size((held + most) >> 20 << 20)
    if wanted > available and not config.force_l1_size:
        if chosen or not safe:
            give = f"give {safe} or less, " if safe else ""
            raise ConfigError(
                f"l1_size {asked}: there are {there}, and the kernel would kill a process: "
                f"{give}free memory, or say --force-l1-size yes"
            )
        check_quotas(replace(config, l1_size=safe))
        return L1Size(
            safe, f"L1 has {safe}: its default, {asked}, is more than the {there} at the start"
        )
    return L1Size(
        asked,
        f"l1_size {asked} takes {wanted / max(1, available):.0%} of the {there} at the start: the "
        "daemon or its neighbours may be killed; give it less, or give the container more",
    )


def _available(wanted: int, root: Path) -> tuple[int, int]:
    """The memory that is available for ``wanted`` bytes, and how much of it an L1 may take without
    a warning. Shared memory may be anybody's, so the wait may be in vain. Without it a daemon that
    is restarted would have a smaller L1 for as long as it lives."""
    wait_s = min(_LONGEST_S, _UNMAP_S + _UNMAP_S_PER_GIB * wanted / (1 << 30))
    until = time.monotonic() + wait_s
    told = False
    while True:
        now = room(root)
        if now.available is None or now.safe is None:  # not known
            return wanted, wanted
        may_come = wanted <= (now.with_shared or 0)
        if wanted <= now.available or not may_come or time.monotonic() > until:
            return now.available, now.safe
        if not told:
            _log.info("waiting %.0f s for memory that engines may have of a former L1", wait_s)
            told = True
        time.sleep(_LOOK_S)
