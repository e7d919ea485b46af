"""The handlers of kvass's logger in an engine. This module imports nothing of vLLM."""

from __future__ import annotations

import logging


def log_as_vllm() -> None:
    """Give kvass's logger the handlers and the level of vLLM's logger, unless the process has
    configured logging itself."""
    ours, theirs = logging.getLogger("kvass"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers and not logging.getLogger().handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.getEffectiveLevel())
