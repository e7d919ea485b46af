"""The handlers of kvass's logger in an engine. This module imports nothing of vLLM."""

from __future__ import annotations

import logging


def log_as_vllm() -> None:
    """Give kvass's logger vLLM's handlers and level, unless the process configured logging."""
    kvass_log, vllm_log = logging.getLogger("kvass"), logging.getLogger("vllm")
    if vllm_log.handlers and not kvass_log.handlers and not logging.getLogger().handlers:
        kvass_log.handlers = list(vllm_log.handlers)
        kvass_log.setLevel(vllm_log.getEffectiveLevel())
