"""A rank's half of LoRA adapters: which weights it holds under which id, step by step.

Laws of this file:

- An adapter is named by its weights in this process's memory, never by its files, name or id.
- It is looked at after each forward pass. An object that is not the one of before is read again; a
  freed object's address may be another's, so objects are known by weak references.
- What was computed counts as one adapter's only if this rank held that one whenever it computed.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from kvass.engine.step_work import AdapterHeld

GONE: Final = ""
"""The digest of an adapter that a rank does not hold."""
UNKNOWN: Final = "?"
"""The digest of one that has none."""
KEPT: Final = 64
"""Changes of an id that are remembered."""
MAX_IDS: Final = 4096
LONG_AGO: Final = 1000
"""With more ids than ``MAX_IDS``, those are forgotten that are gone for so many steps."""


class Held(NamedTuple):
    """What a rank holds under an id since step ``since`` (``StepWork.number``). ``path``: where it
    was read; ``files``: the state of the files there, before and after (``adapter_files.py``).
    Either is empty if it is not known."""

    since: int
    digest: str
    path: str = ""
    files: str = ""


News = dict[int, Held]
"""By id."""


class HeldAdapters:
    """What rank ``rank`` holds. ``listed`` gives the objects by id. ``digest`` names one by its
    content, and is equal for equal weights in any process; ``UNKNOWN`` if it cannot. ``source``
    gives an object's path and files, as ``Held`` has them."""

    def __init__(
        self,
        rank: int,
        listed: Callable[[], Mapping[int, object]],
        digest: Callable[[object], str],
        source: Callable[[object], tuple[str, str]],
    ) -> None:
        self.rank = rank
        self._listed = listed
        self._digest = digest
        self._source = source
        self._objects: dict[int, weakref.ref[object]] = {}
        self._changes: dict[int, deque[Held]] = {}
        self._told: News = {}
        self._untold: set[int] = set()

    def look(self, number: int) -> None:
        """Note what is held in step ``number``. If the step computes, call it again afterwards."""
        listed = self._listed()
        for name, found in listed.items():
            known = self._objects.get(name)
            if known is None or known() is not found:
                self._objects[name] = weakref.ref(found)
                self._note(name, Held(number, self._digest(found), *self._source(found)))
        if len(self._objects) > len(listed):
            for name in self._objects.keys() - listed.keys():
                del self._objects[name]
                self._note(name, Held(number, GONE))
            self._forget(number - LONG_AGO)

    def lost(self, number: int) -> None:
        """It cannot be told any more what is held."""
        self._objects.clear()
        for name in self._changes:
            self._note(name, Held(number, UNKNOWN))

    def may_load(self, adapter: AdapterHeld) -> bool:
        """Whether KV of ``adapter`` is right for a request of its id: this rank holds it, or will
        read it as expected."""
        changes = self._changes.get(adapter.name)
        now = changes[-1].digest if changes else GONE
        return now == adapter.digests[self.rank] or (now == GONE and adapter.expected)

    def computed(self, adapter: AdapterHeld, first: int, last: int) -> bool:
        """Whether this rank held ``adapter`` in step ``first``, and nothing else under its id up to
        step ``last``. In between it may have been gone: then nothing was computed."""
        before, after, digest = GONE, set[str](), adapter.digests[self.rank]
        for held in self._changes.get(adapter.name, ()):
            if held.since <= first:
                before = held.digest
            elif held.since <= last:
                after.add(held.digest)
        return before == digest and after <= {digest, GONE}

    def news(self) -> News:
        """The ids of which something else is held than at the last call."""
        if not self._untold:
            return {}
        news = {name: self._changes[name][-1] for name in self._untold}
        self._untold.clear()
        news = {name: last for name, last in news.items() if self._told.get(name) != last}
        self._told |= news
        return news

    def _note(self, name: int, held: Held) -> None:
        changes = self._changes.setdefault(name, deque(maxlen=KEPT))
        if changes and changes[-1].since == held.since:  # of one step the last look counts
            changes.pop()
        if not changes or changes[-1][1:] != held[1:]:
            changes.append(held)
        self._untold.add(name)

    def _forget(self, before: int) -> None:
        """What is gone since before step ``before``, if there is too much of it."""
        if len(self._changes) > MAX_IDS:
            last = {name: changes[-1] for name, changes in self._changes.items()}
            for name, held in last.items():
                if held.digest == GONE and held.since < before and name not in self._untold:
                    del self._changes[name]
                    self._told.pop(name, None)
