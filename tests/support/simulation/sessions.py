"""Sessions of clients in a simulated world: requests that say when theirs comes back, and commands
that ask for them, fetch and release them.

Chance comes from a generator of its own, so worlds without sessions have the histories they had.
"""

from __future__ import annotations

import random
from typing import Any, Final

from kvass import messages as m

_TAGS: Final = (1, 2, 3)


class ClientSessions:
    """The sessions of a world: four of ten worlds have some."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(f"sessions {seed}")
        self._any = self._chance.random() < 0.4

    def context(self) -> dict[str, Any]:
        """What a request says of its session."""
        if not self._any or self._chance.random() < 0.3:
            return {}
        then_s = self._chance.choice([0.0, 0.001, 0.1, 1.0, 1.0, 5.0, 90.0, 1e9])
        return {"session": self._chance.choice(_TAGS), "then_s": then_s}

    def ask(self, tenant: str) -> m.Request | None:
        """Now and then a question about a session of a tenant."""
        if not self._any or self._chance.random() > 0.1:
            return None
        tag, what = self._chance.choice(_TAGS), self._chance.random()
        if what < 0.2:
            return m.EndSession(session=tag, tenant=tenant)
        return m.AskSession(session=tag, tenant=tenant, fetch=what < 0.7)
