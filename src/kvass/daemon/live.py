"""Options that change while the daemon runs: SIGHUP reads the configuration again.

Law of this file: a configuration with an error changes nothing. One log line names the options that
changed, and those that need a restart.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from copy import copy
from typing import Final

import msgspec

from kvass.config import Config, check_quotas
from kvass.daemon import logs, notify
from kvass.daemon.listen import Access
from kvass.errors import ConfigError, KvassError
from kvass.tiers.url import shown

LIVE: Final = ("allow_uid", "socket_group", "stop_s", "log_level", "quota", "tier")
"""Options that change while the daemon runs; all others need a restart."""
_log: Final = logging.getLogger("kvass")

ChangeTiers = Callable[[list[str]], Awaitable[None]]
"""Raises ``ConfigError``, having changed nothing."""


class LiveConfig:
    """The configuration in force, ``now``, and how to load it again.

    ``read_again`` loads it and raises ``ConfigError``. It is None if there is no file to read.
    """

    def __init__(
        self, config: Config, access: Access, read_again: Callable[[], Config] | None = None
    ) -> None:
        self.now = config
        self.access = access
        self._read_again = read_again

    async def reload(self, change_tiers: ChangeTiers) -> None:
        """Load the configuration, and apply the options that can change."""
        if self._read_again is None:
            _log.warning("SIGHUP: nothing to reload: the daemon was started without --config")
            return
        notify.tell(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            # In a thread: files and the names of users and groups may be remote.
            wanted = await asyncio.to_thread(self._read_again)
            access = await asyncio.to_thread(Access, wanted)
            said = await self._take(wanted, access, change_tiers)
            logs.set_level("info")  # who asked for it hears of it, whatever the level is
            _log.info("SIGHUP: %s", said)
            logs.set_level(self.now.log_level)
        except (KvassError, OSError, ValueError) as error:  # ValueError: a user's name with a NUL
            _log.error("SIGHUP: the options stay as they were: %s", error)
        notify.tell("READY=1")

    async def _take(self, wanted: Config, access: Access, change_tiers: ChangeTiers) -> str:
        """Apply a new configuration; returns what changed, as text. Raises ``ConfigError`` and
        changes nothing then."""
        names = [n for n in Config.__struct_fields__ if getattr(wanted, n) != getattr(self.now, n)]
        changed = {name: getattr(wanted, name) for name in names if name in LIVE}
        check_quotas(msgspec.structs.replace(self.now, **changed))  # with the L1 that there is
        before = copy(self.access)
        self.access.become(access, self.now.socket)
        try:
            if "tier" in changed:
                await change_tiers(wanted.tier)
        except ConfigError:
            self.access.become(before, self.now.socket)
            raise
        said = [
            f"{name} is {shown(repr(value))} (was {shown(repr(getattr(self.now, name)))})"
            for name, value in changed.items()
        ]
        if fixed := ", ".join(name for name in names if name not in LIVE):
            said.append(f"cannot change without a restart: {fixed}")
        self.now = msgspec.structs.replace(self.now, **changed)
        return "; ".join(said) or "nothing has changed"
