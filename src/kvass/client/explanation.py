"""The reasons of ``kvass explain``: their sentences, from the fields of a lookup
(``messages.Explained``), and which of them the client of a request is told.

Law of this file: a client is told no reason that says whether somebody else computed its prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from kvass.kinds import KINDS
from kvass.types import printable, short_of

INTERNAL: Final = re.compile(r"(?:\d+_)?(.+)-[0-9a-f]{8}")
"""vLLM's internal id of a request. It adds a prefix to the user's id if the request has several
outputs, and a random suffix."""
REASONS: Final[dict[str, str]] = {
    "": "Everything that can match did.",
    "absent": "Nobody stored {rest}, as far as the daemon remembers.",
    "no_window_here": "No window was stored where the prompt parts from earlier ones: {detail} "
    "more tokens of full attention are cached, and are computed once more. With them the engine "
    "stores the window.",
    "tier_down": "L1 does not have {rest}, and a tier is down: {detail}.",
    "not_waited": "It did not wait for tiers or stores, because too many lookups waited already.",
    "not_worth_it": "A tier has {rest}, but loading it takes longer than computing it.",
    "no_room": "A tier has {rest}, but L1 had no room to load it.",
    "late": "Tiers or stores were not done with {rest} after {waited}.",
    "other_namespace": "Only an engine with other settings or weights stored {rest}. They "
    "differ in {detail}.",
    "other_salt": "This engine saw the beginning of the prompt under another salt only. Requests "
    "with different salts share nothing.",
    "other_adapter": "This engine saw the beginning of the prompt with another LoRA adapter only. "
    "Different adapters share nothing.",
    "engine_busy": "This engine computed {rest} before, but needed its blocks before they "
    "were stored.",
    "too_long": "{Rest} is more than one lookup can ask for.",
    "ranks_missing": "Not all ranks of the engine were connected to the daemon.",
    "no_daemon": "The engine was not connected to the daemon.",
    "other_node": "The engine's ranks use several daemons, and a hit is what all of them have: "
    "{detail}.",
    "no_answer": "The daemon did not answer in time.",
    "not_sent": "The lookup was not sent: too many requests were open, or it was too large.",
    "refused": "The daemon refused the lookup. The engine's log says why.",
    "clearing": "The daemon had not confirmed a clear yet.",
    "weights_unnamed": "The weights had no name yet. The engine's log says why.",
    "weights_changed": "The weights may have changed, and the engine's cache was not reset yet.",
    "adapter_unknown": "The weights of the request's LoRA adapter were not known.",
    "not_read": "The request does not read caches.",
    "loads_off": "This engine loads nothing from kvass.",
    "load_limit": "The request allows no more tokens to be loaded.",
    "too_short": "The prompt is too short: no block or chunk of it can match.",
    "too_little": "Even if all of it had been cached, looking it up and loading it would have "
    "taken longer than computing it.",
    "no_hashes": "Hashes do not say all of the prompt's content: another one may have the same.",
    "own_hit": "The engine's own cache had everything that can match.",
    "not_loaded": "It matched, but the engine took the tokens from elsewhere or computed them.",
    "cheaper_to_compute": "{Rest} matched, but the engine computed it, because that was "
    "faster than loading it.",
    "load_failed_here": "It matched, but the copy into the engine failed or was late. The engine "
    "computed the tokens.",
}
"""By reason. ``evicted`` and others have a sentence for each cause in ``CAUSES``."""
CAUSES: Final[dict[str, str]] = {
    "capacity": "{Rest} was evicted{ago} to make room in L1.",
    "handed_over": "{Rest} was evicted{ago} to make room for another model or tenant.",
    "quota": "{Rest} was evicted{ago}, because its tenant may have no more of L1.",
    "not_retained": "{Rest} was loaded from a tier, and not kept in L1 after its use{ago}.",
    "cleared": "{Rest} was cleared{ago} by a command.",
    "reset": "{Rest} was cleared{ago} by a reset of an engine's prefix cache.",
    "forgotten": "{Rest} was dropped{ago} with its namespace, to make room for another.",
    "unfinished": "An engine computed {rest}, but its store did not finish{ago}.",
    "refused": "An engine computed {rest}, but L1 had no room for it{ago}.",
    "load_failed": "A tier had {rest}, but could not load it{ago}.",
    "kept": "{Rest} was evicted{ago} although it was retained, because nothing else could go.",
    "ended": "{Rest} was evicted{ago} before others, as its session had ended, or is away.",
}
TOLD: Final = frozenset(
    {
        *("", "own_hit"),  # a hit shows in the latency, too
        *("too_short", "too_little", "too_long", "no_hashes", "not_read", "load_limit"),
        *("no_daemon", "no_answer", "refused", "not_sent", "clearing", "ranks_missing"),
        *("weights_unnamed", "weights_changed", "loads_off"),
    }
)
"""The reasons that a client is told: of hits, of its own request, of the whole service."""
NOT_FOUND: Final = "not_found"
"""What a client is told instead of any other reason."""
_CAUSE_OF: Final = {
    "evicted": "capacity",
    "over_quota": "quota",
    "cleared": "cleared",
    "not_stored": "unfinished",
    "load_failed": "load_failed",
}
"""The cause that is told of a reason if its own is not known."""
_SPANS: Final = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def told(why: str) -> str:
    """What the client of a request is told of the reason ``why``."""
    return why if why in TOLD else NOT_FOUND


def users_id(request: str) -> str:
    """The id of a request as its user knows it."""
    internal = INTERNAL.fullmatch(request)
    return internal[1] if internal else request


def is_request(request: str, wanted: str) -> bool:
    """Whether ``wanted`` is the id of ``request``: its own, its user's, or the user's id of the
    completion of which it is one prompt. Of a request that is known by its short name
    (``types.short_name``), the beginning counts."""
    if (begin := short_of(request)) is not None:
        if request == wanted or printable(wanted).startswith(re.sub(r"^\d+_", "", begin)):
            return True
        request, wanted = begin, printable(wanted)
    if len(wanted) > len(request):
        return False
    return re.fullmatch(rf"(\d+_)?{re.escape(wanted)}(-\d+)?(-[0-9a-f]{{8}})?", request) is not None


def span(seconds: float) -> str:
    """A time in its largest unit that fits."""
    for unit, name in _SPANS:
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1000:.3g} ms"


def sentence(entry: Mapping[str, Any]) -> str:
    """Why no more of a lookup matched, in a sentence or two."""
    why, cause = str(entry.get("why", "")), str(entry.get("cause", ""))
    text = REASONS.get(why) or CAUSES.get(cause) or CAUSES.get(_CAUSE_OF.get(why, ""))
    if text is None:
        return f"For a reason that this version does not know: {why}."
    end, ago = entry.get("end_token", 0), entry.get("left_s")
    rest = f"what follows token {end:,}" if end else "the beginning of the prompt"
    kind = entry.get("kind", "")
    if kind and not (kind in KINDS and KINDS[kind].whole):
        rest += f" in a {kind} layer group"
    return text.format(
        rest=rest,
        Rest=rest[0].upper() + rest[1:],
        ago="" if ago is None else f" {span(ago)} ago",
        detail=entry.get("detail", ""),
        waited=span(entry.get("waited_s", 0.0)),
    )
