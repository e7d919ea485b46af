"""A tier that says its password wherever it can say anything."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from kvass.errors import ConfigError
from tests.support.tiers.memory import MemoryTier


class LoudTier(MemoryTier):
    """``opens``: otherwise it is refused, and that says the password, too."""

    def __init__(self, password: str, opens: str = "yes") -> None:
        super().__init__()
        self._ways = [password, quote(password), repr(password), str({"password": password})]
        if opens == "no":
            raise ConfigError(" ".join(self._ways))

    def probe(self, keys: Sequence[bytes]) -> list[bool]:
        for way in self._ways:
            logging.getLogger("a.library").warning("connecting with %s", way)
        raise RuntimeError(" ".join(self._ways))

    def report(self) -> dict[str, Any]:
        return {f"way{number}": way for number, way in enumerate(self._ways)} | {"kept": 1}
