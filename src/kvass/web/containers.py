"""The container of a process, from the name of its control group.

It is known if this process sees the other's: on the same machine, in the same PID namespace or in
one above it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_ID: Final = re.compile(r"[0-9a-f]{64}")
_SHOWN: Final = 12
"""How many digits of an id container engines show."""
_PROC: Final = Path("/proc")


def container_of(pid: int, proc: Path = _PROC) -> str:
    """The id of the container, shortened as by ``docker ps``. Empty: none, or it is not known."""
    try:
        ids = _ID.findall((proc / str(pid) / "cgroup").read_text())
    except OSError:
        return ""
    return ids[-1][:_SHOWN] if ids else ""
