"""The configuration of a running daemon. SIGHUP reads it again.

Law of this file: a configuration with an error changes nothing. One log line lists the options that
were changed, and those that cannot change without a restart.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from kvass.config import Config, check_quotas, shown_value
from kvass.daemon import logs, notify
from kvass.daemon.listen import Access
from kvass.daemon.notices import Notices
from kvass.errors import ConfigError, KvassError

LIVE: Final = ("allow_uid", "socket_group", "stop_s", "log_level", "quota", "tier")
"""Options that change while the daemon runs; all others need a restart."""
_log: Final = logging.getLogger("kvass")

ChangeTiers = Callable[[list[str]], Awaitable[None]]
"""Changes the tiers to those of the given URLs. If that fails, it raises ``ConfigError`` and the
tiers stay as they were."""


class LiveConfig:
    """Holds the ``current`` configuration of a daemon, and reloads it on SIGHUP.

    ``read_again`` reads the configuration again and raises ``ConfigError``. None: there is no file
    to read.
    """

    def __init__(
        self,
        config: Config,
        access: Access,
        notices: Notices,
        read_again: Callable[[], Config] | None = None,
    ) -> None:
        self.current = config
        self.access = access
        self._notices = notices
        self._read_again = read_again

    async def reload(self, change_tiers: ChangeTiers) -> None:
        """Read the configuration again, apply the options in ``LIVE``, and log what changed."""
        if self._read_again is None:
            _log.warning("SIGHUP: nothing to reload: the daemon was started without --config")
            return
        notify.send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            # In a thread: files and the names of users and groups may be remote.
            wanted = await asyncio.to_thread(self._read_again)
            access = await asyncio.to_thread(Access, wanted)
            changes = await self._apply(wanted, access, change_tiers)
            logs.set_level("info")  # this line is written whatever the level is
            _log.info("SIGHUP: %s", changes)
            logs.set_level(self.current.log_level)
            self._notices.over("reload")
            self.access.look_at(self.current.socket, self._notices)
        except (KvassError, OSError, ValueError) as error:  # ValueError: a user's name with a NUL
            self._notices.problem("reload", f"SIGHUP: the options stay as they were: {error}")
        notify.send("READY=1")

    def keep_quota(self, quota: list[str]) -> None:
        """The quotas of the file could not be set: ``quota`` stays, and the next reload tries those
        of the file again."""
        self.current = msgspec.structs.replace(self.current, quota=quota)

    async def _apply(self, wanted: Config, access: Access, change_tiers: ChangeTiers) -> str:
        """Apply the options in ``LIVE``. Returns a text that says what changed. If it raises
        ``ConfigError``, nothing has changed."""
        current = self.current
        names = [n for n in Config.__struct_fields__ if getattr(wanted, n) != getattr(current, n)]
        changed = {name: getattr(wanted, name) for name in names if name in LIVE}
        check_quotas(msgspec.structs.replace(current, **changed))  # L1 keeps its size
        before = self.access
        self._replace_access(access)
        try:
            if "tier" in changed:
                await change_tiers(wanted.tier)
        except ConfigError:
            self._replace_access(before)
            raise
        lines = [
            f"{name} is {shown_value(name, new)} (was {shown_value(name, getattr(current, name))})"
            for name, new in changed.items()
        ]
        if fixed := ", ".join(name for name in names if name not in LIVE):
            lines.append(f"cannot change without a restart: {fixed}")
        self.current = msgspec.structs.replace(current, **changed)
        return "; ".join(lines) or "nothing has changed"

    def _replace_access(self, access: Access) -> None:
        """Connections that there are stay. Raises ``ConfigError``."""
        access.apply(self.current.socket)
        self.access = access
