"""Whether cached KV is loaded or computed again. This is the one rule for it: of rows that tiers
have (``core/tiers/plan.py``), and of rows that L1 has (``engine/worth.py``).

A load is worth it if ``load_s <= compute_s``. Both are seconds by which the request's first token
comes later: ``load_s`` if its KV is loaded, ``compute_s`` if the engine computes it. At a tie it is
loaded, because a load delays no other request of the engine.

An unknown time does not prevent a load: an unknown ``load_s`` is 0, an unknown ``compute_s`` is
``UNKNOWN_S``. A refused load measures nothing, so each refusal divides the estimate of ``load_s``
by ``EASIER``. A load that seems 20 times too slow is tried again after 62 refusals.
"""

from __future__ import annotations

import math
from typing import Final

UNKNOWN_S: Final = math.inf
EASIER: Final = 1.05


def worth_loading(load_s: float, compute_s: float) -> bool:
    """The rule."""
    return load_s <= compute_s


def compute_s(tokens: float, tokens_s: float) -> float:
    """How long computing ``tokens`` takes at ``tokens_s`` tokens per second (0: unknown)."""
    return tokens / tokens_s if tokens_s else UNKNOWN_S
