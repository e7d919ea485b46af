"""The last lookups of each engine, for ``kvass explain``.

Law of this file: memory is bounded, and no entry has tokens or hashes of a prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Final

import msgspec

from kvass.core.clients.registry import Instance, model_of

ENTRIES: Final = 256
"""The most entries of one engine."""
ENGINES: Final = 32
"""The most engines of which entries are kept; also of engines that are gone."""
TEXT: Final = 512
"""The most characters of a text in an entry."""
NOT_LOADED: Final = ("not_loaded", "cheaper_to_compute")
"""The reasons of an engine that loads less than matched."""
_RECENT: Final = 2


class LookupEntry(msgspec.Struct, gc=False):
    """One answered lookup. Equal lookups of one request, one after the other, are one entry.

    ``when``: when it was answered last. ``prompt_tokens``: 0 if not known. ``local_tokens``: those
    that the engine's own cache has. ``asked_tokens``: those that the lookup asked for beyond them.
    ``hit_tokens``: those of them that hit. ``end_token``: where the match ended. ``why``: the
    reason; empty if nothing more could match. ``cause``, ``left_s``: why and when the first missing
    row left L1 (``left.py``); 0 if that is not known. ``kind``: the kind of its layer group.
    ``detail``: more about the reason. ``waited_s``: how long the lookup waited for tiers and
    stores. ``times``: how many equal lookups there were.
    """

    request: str
    when: float
    prompt_tokens: int = 0
    local_tokens: int = 0
    asked_tokens: int = 0
    hit_tokens: int = 0
    end_token: int = 0
    why: str = ""
    cause: str = ""
    left_s: float = 0.0
    kind: str = ""
    detail: str = ""
    waited_s: float = 0.0
    times: int = 1

    def same(self, other: LookupEntry) -> bool:
        """Whether two entries of one request tell the same."""
        return (
            (self.why, self.cause, self.detail) == (other.why, other.cause, other.detail)
            and self.end_token == other.end_token
            and self.local_tokens == other.local_tokens
            and self.hit_tokens == other.hit_tokens
        )


class EngineLog:
    """The last entries of one engine. ``model``: its name, for display. ``shadow``: it is in shadow
    mode."""

    def __init__(self, model: str) -> None:
        self.model, self.shadow = model, False
        self.entries: deque[LookupEntry] = deque()
        self._waiting: dict[str, LookupEntry] = {}
        """Those of ``entries`` whose request has got no blocks yet, by request."""

    def add(self, entry: LookupEntry, reported: bool = False) -> None:
        """Add an entry. ``reported``: the result of the lookup is reported with ``ended``.

        An engine repeats the lookups of requests that wait for blocks. If the result of a former
        one was not reported, the entry replaces it. If the engine reports no results, and the
        request has an equal entry among the last ``_RECENT``, only that one is renewed.
        """
        if (replaced := self._waiting.get(entry.request)) is not None:
            entry.times += replaced.times
            entry.waited_s = max(entry.waited_s, replaced.waited_s)
            for name in LookupEntry.__struct_fields__:
                setattr(replaced, name, getattr(entry, name))
            return
        if reported:
            self._waiting[entry.request] = entry
            self._append(entry)
            return
        for before in islice(reversed(self.entries), _RECENT):
            if before.request == entry.request:
                if before.same(entry):
                    before.when, before.left_s = entry.when, entry.left_s
                    before.times += 1
                    return
                break
        self._append(entry)

    def _append(self, entry: LookupEntry) -> None:
        if len(self.entries) == ENTRIES:
            dropped = self.entries.popleft()
            if self._waiting.get(dropped.request) is dropped:
                del self._waiting[dropped.request]
        self.entries.append(entry)

    def ended(self, request: str, why: str, hit_tokens: int = 0) -> None:
        """The result of a request's last lookup was reported. ``why``: of its misses. In shadow
        mode nothing is loaded, and the entry says what would have been."""
        waiting = self._waiting.pop(request, None)
        if why == "load_limit" and waiting is not None:
            waiting.why = why
        elif why == "load_failed_here":
            self.load_failed(request)
        elif why in NOT_LOADED and waiting is not None and not self.shadow:
            waiting.why, waiting.hit_tokens, waiting.kind = why, hit_tokens, ""
            waiting.end_token = waiting.local_tokens + hit_tokens

    def load_failed(self, request: str, detail: str = "") -> bool:
        """The load of a request failed, so its last lookup hit nothing. False: it has no entry."""
        if (entry := self.last(request)) is None:
            return False
        entry.why, entry.hit_tokens, entry.end_token = "load_failed_here", 0, entry.local_tokens
        entry.cause, entry.left_s, entry.detail = "", 0.0, detail
        return True

    def last(self, request: str) -> LookupEntry | None:
        return next((e for e in reversed(self.entries) if e.request == request), None)


class LookupLog:
    def __init__(self) -> None:
        self.engines: dict[str, EngineLog] = {}

    def of(self, instance: Instance) -> EngineLog:
        """The log of an engine, to add an entry to."""
        log = self.engines.get(instance.id)
        if log is None:
            log = self.engines[instance.id] = EngineLog(model_of(instance.terms))
            if len(self.engines) > ENGINES:
                del self.engines[min(self.engines, key=self._last_used)]
        return log

    def _last_used(self, instance: str) -> float:
        entries = self.engines[instance].entries
        return entries[-1].when if entries else float("inf")

    def fields(self, engine: str, request: str, limit: int, now: float) -> list[dict[str, Any]]:
        """The last ``limit`` entries, oldest first, as JSON-able values.

        ``engine``: the beginning of an instance's id, or a part of a model's name. ``request``: a
        part of a request's id. An empty one leaves out nothing.
        """
        found = sorted(self._chosen(engine, request), key=lambda each: each[2].when)
        return [
            {
                "engine": instance,
                "model": log.model,
                "shadow": log.shadow,
                "age_s": round(now - entry.when, 3),
                **msgspec.structs.asdict(entry),
                "left_s": round(now - entry.left_s, 3) if entry.left_s else None,
            }
            for instance, log, entry in found[max(0, len(found) - limit) :]
        ]

    def _chosen(self, engine: str, request: str) -> Iterator[tuple[str, EngineLog, LookupEntry]]:
        for instance, log in self.engines.items():
            if instance.startswith(engine) or engine in log.model:
                entries: Iterable[LookupEntry] = log.entries
                yield from ((instance, log, e) for e in entries if request in e.request)
