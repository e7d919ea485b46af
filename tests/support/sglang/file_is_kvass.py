"""A plug-in of pytest: who asks SGLang for its storage backend "file" gets kvass.

``-p tests.support.sglang.file_is_kvass``, with the daemon's socket in ``KVASS_IS_FILE``; without it
nothing is changed. The directory of the file backend becomes the tag, so tests with directories of
their own share nothing. How often each backend was made is written at the end.
"""

from __future__ import annotations

import os
import sys
import types
from collections import Counter
from typing import Any

VARIABLE = "KVASS_IS_FILE"
_made: Counter[str] = Counter()
_open: list[Any] = []


def pytest_configure(config: object) -> None:
    stub: Any = types.ModuleType("datasets")  # SGLang's test kits import it
    stub.load_dataset = None
    sys.modules.setdefault("datasets", stub)
    from sglang.srt.managers.cache_controller import HiCacheController

    original = HiCacheController.attach_storage_backend

    def attach(self: Any, storage_backend: str, *args: Any, **more: Any) -> Any:
        socket = os.environ.get(VARIABLE, "")
        if socket and storage_backend == "file":
            storage_backend = "dynamic"
            extra = more.get("storage_backend_extra_config") or {}
            more["storage_backend_extra_config"] = extra | backend(socket)
        done = original(self, storage_backend, *args, **more)
        _made[type(self.storage_backend).__name__] += 1
        _open.append(self.storage_backend)
        return done

    HiCacheController.attach_storage_backend = attach


def backend(socket: str) -> dict[str, Any]:
    """The extra config. The weights of test fixtures are no files and are never replaced."""
    from sglang.srt.environ import envs

    from kvass.connectors.sglang.plugin import backend_config

    return backend_config() | {
        "kvass.socket": socket,
        "kvass.model_id": "unit",
        "kvass.tag": str(envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.get()),
        "kvass.fixed_weights": True,
    }


def pytest_runtest_logfinish() -> None:
    """SGLang's fixtures leave their backends open, and a user may have 512 sessions."""
    while _open:
        if close := getattr(_open.pop(), "close", None):
            close()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"storage backends made: {dict(_made)}")
