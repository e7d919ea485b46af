"""kvass's lines in vLLM's log. Nothing of vLLM is imported."""

from __future__ import annotations

import logging


def log_as_vllm() -> None:
    """kvass's lines go where vLLM's go and look like them, unless the process logs by itself."""
    ours, theirs = logging.getLogger("kvass"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers and not logging.getLogger().handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.getEffectiveLevel())
