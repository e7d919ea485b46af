"""The worker's half of LoRA adapters: which weights a rank held under which id, step by step.

Laws of this file:

- An adapter is identified by its weights in this process's memory, never by its files, name or id.
- The adapters are checked after each forward pass. The weights of an object that is new are
  digested. Objects are compared by weak references, because a new object may have the address of
  a freed one.
- KV counts as computed with an adapter only if this rank held it in every step that computed it.
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
"""The digest of an adapter whose weights cannot be digested."""
KEPT_CHANGES: Final = 64
"""How many changes of an id are remembered."""
MAX_IDS: Final = 4096
FORGET_AFTER_STEPS: Final = 1000
"""With more than ``MAX_IDS`` ids, an id is forgotten after this many steps without an adapter."""


class Held(NamedTuple):
    """What a rank holds under an id, since step ``since`` (``StepWork.number``). ``path``: where
    the rank read it. ``files``: the state of the files there, which was equal before and after
    reading (``adapter_files.py``). Either is empty if it is not known."""

    since: int
    digest: str
    path: str = ""
    files: str = ""


News = dict[int, Held]
"""By adapter id: what a rank holds now, for the ids that changed."""


class HeldAdapters:
    """The LoRA adapters that rank ``rank`` holds. ``listed`` returns the adapter objects by id.
    ``digest`` returns the digest of an object's weights, which is equal for equal weights in any
    process, or ``UNKNOWN``. ``source`` returns an object's path and files, as in ``Held``."""

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
        self._objects: dict[int, Callable[[], object | None]] = {}
        """By id, weak references to what was there when the rank last looked."""
        self._changes: dict[int, deque[Held]] = {}
        self._reported: News = {}
        self._unreported: set[int] = set()

    def look(self, number: int) -> None:
        """Note what is held in step ``number``. If the step computes, call this before and after
        the forward pass."""
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
            self._forget(number - FORGET_AFTER_STEPS)

    def note_unknown(self, number: int) -> None:
        """Nobody knows what this rank holds in step ``number``, under any id that it ever had. The
        next ``look`` sees all of them anew."""
        self._objects = dict.fromkeys(self._changes, lambda: None)
        for name in self._changes:
            self._note(name, Held(number, UNKNOWN))

    def may_load(self, adapter: AdapterHeld) -> bool:
        """Whether KV of ``adapter`` may be loaded for a request with its id: this rank holds the
        adapter, or holds nothing under this id and ``adapter.expected`` is set."""
        changes = self._changes.get(adapter.name)
        now = changes[-1].digest if changes else GONE
        return now == adapter.digests[self.rank] or (now == GONE and adapter.expected)

    def computed(self, adapter: AdapterHeld, first: int, last: int) -> bool:
        """Whether this rank held ``adapter`` in step ``first``, and no other weights under its id
        up to step ``last``. In between it may have held nothing: then it computed nothing."""
        before, after, digest = GONE, set[str](), adapter.digests[self.rank]
        for held in self._changes.get(adapter.name, ()):
            if held.since <= first:
                before = held.digest
            elif held.since <= last:
                after.add(held.digest)
        return before == digest and after <= {digest, GONE}

    def news(self) -> News:
        """What is held now under each id that changed since the last call."""
        if not self._unreported:
            return {}
        news = {name: self._changes[name][-1] for name in self._unreported}
        self._unreported.clear()
        news = {name: last for name, last in news.items() if self._reported.get(name) != last}
        self._reported |= news
        return news

    def _note(self, name: int, held: Held) -> None:
        changes = self._changes.setdefault(name, deque(maxlen=KEPT_CHANGES))
        if changes and changes[-1].since == held.since:  # the last note of a step counts
            changes.pop()
        if not changes or changes[-1][1:] != held[1:]:
            changes.append(held)
        self._unreported.add(name)

    def _forget(self, before: int) -> None:
        """If there are too many ids, forget those under which nothing is held since before step
        ``before``."""
        if len(self._changes) > MAX_IDS:
            last = {name: changes[-1] for name, changes in self._changes.items()}
            for name, held in last.items():
                if held.digest == GONE and held.since < before and name not in self._unreported:
                    del self._changes[name]
                    self._reported.pop(name, None)
