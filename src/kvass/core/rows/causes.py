"""Why rows leave L1, and what that explains.

Law of this file: the list is closed. Each row leaves for one of these causes.
"""

from __future__ import annotations

from typing import Final, Literal

Cause = Literal[
    "capacity",
    "handed_over",
    "ended",
    "kept",
    "not_retained",
    "replaced",
    "cleared",
    "reset",
    "forgotten",
    "unfinished",
    "load_failed",
    "no_room",
    "unwanted",
]
"""Why rows left L1:

- capacity: they were evicted to make room for rows of their layer group.
- handed_over: they were evicted to make room for another layer group or tenant.
- ended: they were evicted before others, because their client had ended its session, or it was to
  come back later than L1 keeps rows.
- kept: they were evicted although they were retained, because nothing else could go.
- not_retained: they were loaded from a tier, and the daemon does not keep such rows.
- replaced: they were tails, and another row has all their blocks.
- cleared: a command cleared them. reset: their engine did.
- forgotten: their namespace was removed to make room for another.
- unfinished: an engine reserved them and did not write them in time.
- load_failed: a tier had them, and could not load them.
- no_room: they were to be loaded, and there was no room for all of the hit.
- unwanted: they were to be loaded ahead of use, and nobody waits for them any more.
"""

ClearCause = Literal["cleared", "reset", "forgotten"]
"""Those for which all rows of a namespace leave."""
CAUSES: Final[dict[str, str]] = {
    "capacity": "evicted",
    "handed_over": "evicted",
    "ended": "evicted",
    "kept": "evicted",
    "not_retained": "evicted",
    "quota": "over_quota",
    "cleared": "cleared",
    "reset": "cleared",
    "forgotten": "cleared",
    "unfinished": "not_stored",
    "refused": "not_stored",
    "load_failed": "load_failed",
}
"""By cause, the reason of a miss (``metrics.MISSES``). The causes are those of ``Cause``, and
two more. Of rows that left for another cause nothing is recorded: it explains no miss.

- quota: it was evicted because its tenant has no more room (``Left.own``).
- refused: an engine offered it, and L1 had no room or the engine's share was used up.
"""
