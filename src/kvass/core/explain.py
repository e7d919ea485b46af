"""Why a lookup did not match more, and the entry of each answered lookup (``lookup_log.py``).

Law of this file: an explanation looks for a few keys at most, however long the prompt is.
"""

from __future__ import annotations

from itertools import islice
from typing import Final, NamedTuple

from kvass.core.clients.lookup_log import TEXT, LookupEntry
from kvass.core.clients.registry import Instance, differences, distance
from kvass.core.matching.coverage import BoolArray
from kvass.core.matching.prefix import Hit, PrefixView
from kvass.core.rows.causes import CAUSES
from kvass.core.rows.row_classes import Namespace
from kvass.core.state import State
from kvass.kinds import KINDS
from kvass.messages import RequestContext
from kvass.types import U64Array

HINTS: Final = ("other_salt", "other_adapter", "engine_busy")
"""The reasons in ``RequestContext.if_absent``."""
KEYS: Final = 4
"""How many missing keys are looked for in other namespaces. Their chunks may be longer."""
NAMESPACES: Final = 8
"""The most other namespaces that are searched."""
_LOOK: Final = 64
"""Among how many of the newest namespaces they are chosen."""


class Ending(NamedTuple):
    """What ended a match. The fields are those of ``LookupEntry``."""

    why: str
    cause: str = ""
    left_s: float = 0.0
    kind: str = ""
    detail: str = ""


ALL: Final = Ending("")
"""Nothing more could match."""
_ABSENT: Final = {kind: Ending("absent", kind=kind) for kind in KINDS}
"""No reason is known. By the kind of the layer group whose row is missing."""


def why_ended(
    state: State,
    view: PrefixView,
    there: list[BoolArray],
    hit: Hit,
    why: str,
    context: RequestContext,
) -> Ending:
    """What ended the match ``hit`` of a prompt. ``there``: as for ``PrefixView.longest``.

    ``why``: the reason that is known (``metrics.MISSES``). If it is ``absent``, look for another.
    """
    missing, lost = view.missing(hit.chunks, there), 0
    if (whole := view.whole(there) - view.spare) > hit.chunks:
        missing, lost = view.missing(whole - 1, there) or missing, whole - hit.chunks
    if missing is None and hit.blocks >= len(view.rest):
        return ALL
    if why != "absent":
        return Ending(why)
    if missing is None:
        number, wanted, after = 0, view.rest[hit.blocks :], view.rest[hit.blocks : hit.blocks + 1]
    else:
        number, chunk = missing
        wanted, after = view.keys[chunk : chunk + 1], view.keys[chunk : chunk + KEYS]
    ns, spec = view.ns, view.ns.classes[number].spec
    kind = spec.layout.kind
    if (gone := state.followers.left.find(ns.id, spec.group, wanted)) is not None:
        return Ending(CAUSES[gone.cause], gone.cause, gone.when, kind)
    if lost and spec.layout.rules.windowed:
        return Ending("no_window_here", kind=kind, detail=f"{ns.tokens(lost, 0):,}")
    if len(state.namespaces) > 1 and (detail := _elsewhere(state, ns, after)):
        return Ending("other_namespace", kind=kind, detail=detail)
    if context.if_absent in HINTS and context.absent_chunk == hit.chunks:
        return Ending(context.if_absent, kind=kind)
    return _ABSENT[kind]


def _elsewhere(state: State, ns: Namespace, keys: U64Array) -> str:
    """In which fields ``ns`` differs from the most similar namespace that has one of ``keys``.
    Empty: none has."""
    newest = islice(reversed(state.namespaces.values()), _LOOK)
    others = [other for other in newest if other is not ns and len(other.classes[0].index)]
    others.sort(key=lambda other: other.model != ns.model)
    found = [
        differences(other.terms, ns.terms)
        for other in others[:NAMESPACES]
        if state.rows.there(other.classes[0].index.find(keys)).any()
    ]
    fewest = min(found, key=distance, default=())
    return "; ".join(fewest)[:TEXT]


def note(
    state: State,
    instance: Instance,
    request: str,
    context: RequestContext,
    ending: Ending,
    asked: int = 0,
    hit: int = 0,
    end: int = 0,
    waited_s: float = 0.0,
) -> None:
    """Record an answered lookup. ``asked``, ``hit``: tokens, as in ``LookupEntry``. ``end``: the
    token at which the match ended."""
    prompt, local = max(0, context.prompt_tokens), max(0, context.local_tokens)
    hit, end = max(0, min(hit, end - local)), max(end, local)
    entry = LookupEntry(request, state.now, prompt, local, asked, hit, end, *ending, waited_s)
    state.log.of(instance).add(entry, context.reported)


def note_again(state: State, instance: Instance, request: str, tokens: int) -> None:
    """A lookup ``again`` found ``tokens`` more tokens of the request that was looked up last."""
    entry = state.log.of(instance).last(request)
    if entry is not None and tokens:
        entry.end_token += tokens
        entry.hit_tokens = max(0, entry.end_token - entry.local_tokens)
