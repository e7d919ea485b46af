"""What an operator must know of this daemon beside its figures: ``kvass status`` shows it, for as
long as it is so. A log line alone is seen by those who look for it.
"""

from __future__ import annotations

import logging
from typing import Any, Final

_log: Final = logging.getLogger("kvass")


class Notices:
    """The notices by subject: a newer one replaces the older one. Threads may use it.

    A problem makes ``kvass status --check`` fail: the daemon does not do what it was told to.
    """

    def __init__(self) -> None:
        self._problems: dict[str, str] = {}
        self._notes: dict[str, str] = {}

    def problem(self, subject: str, text: str) -> None:
        _log.error("%s", text)
        self._problems[subject] = text

    def note(self, subject: str, text: str) -> None:
        _log.warning("%s", text)
        self._notes[subject] = text

    def over(self, subject: str) -> None:
        """Forget what was said about ``subject``."""
        self._problems.pop(subject, None)
        self._notes.pop(subject, None)

    def fields(self) -> dict[str, Any]:
        """The fields of ``kvass status``."""
        return {"problems": [*self._problems.values()], "notes": [*self._notes.values()]}
