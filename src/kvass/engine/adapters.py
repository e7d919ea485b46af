"""The scheduler's half of LoRA adapters: the salt to mix into the chunk hashes of their requests.

Engines hash an adapter's name and path, and refer to it by an id. The files at the path may change,
and so may the adapter of an id. So the ranks report the weights that they hold
(``held_adapters.py``). The salt is a digest of these weights.

Laws of this file:

- The salt of an adapter depends only on the weights that all ranks hold since the same step.
- Each load and store names the weights that every rank must hold. A rank that holds others refuses
  to copy.
- An engine's own prefix cache knows an adapter by a text (``Adapter.text``). If a text stood for
  two salts since that cache was emptied, the cache may have blocks of both. Requests with this text
  run uncached until the cache is emptied.
- A rank may read an adapter again before it computes a request. So a load needs the files to be
  those that all ranks last read, in the state that one of them saw. The salt is that of the weights
  read then.
- Only the threads that this file starts access the file system. A step waits for them at most
  ``WAIT_S``. At most one check of the files at a path runs at a time.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

from kvass.engine import identity
from kvass.engine.adapter_files import files_state, same_files
from kvass.engine.boundary import log, on_thread
from kvass.engine.held_adapters import GONE, UNKNOWN, Held, News
from kvass.engine.protocols import Adapter
from kvass.engine.step_work import AdapterHeld

WAIT_S: Final = 0.005
"""How long a step may wait for the file system, for all its requests together."""
RECENT_S: Final = 0.05
"""How long the result of a check in an earlier step is valid, from the beginning of the check."""
PATIENCE_S: Final = 0.25
"""A check that takes longer is ignored, and no lookup stays pending because of it."""
MAX_KNOWN: Final = 10_000
"""How many texts are remembered, and how many ids, and how many paths. Requests with a text that is
not remembered run uncached."""

APART: Final = (
    "the ranks read other files of LoRA adapter %s, so its requests load nothing until they read "
    "the same ones: if each machine has a copy, give them one shared folder (of this adapter it is "
    "not logged again)"
)


class NoSalt(enum.Enum):
    """The reason why the salt of an adapter is not known, so that a request cannot be cached."""

    PENDING = "it will be known in a later step"
    UNKNOWN = "it is not known at present"
    NEVER = "it will not be known while this request lives"


@dataclass(frozen=True)
class NamedAdapter:
    """An adapter whose weights are known. ``salt`` is equal for equal weights in any engine of this
    namespace."""

    salt: bytes
    held: AdapterHeld


@dataclass
class AdapterState:
    """The state of one adapter id. ``ranks``: what each rank holds under it. ``named``: the last
    weights on which all ranks agreed. ``texts``: the texts of the requests with this id."""

    ranks: list[Held]
    named: NamedAdapter | None = None
    texts: set[str] = field(default_factory=set)

    @property
    def held(self) -> bool:
        """Whether some rank holds weights under this id, or may hold some."""
        return any(one.digest != GONE for one in self.ranks)


@dataclass
class PathState:
    """The state of one path. ``read``: the weights that all ranks last read from there, and the
    states of the files that they saw then. ``apart``: ``APART`` was logged. ``files``: the state of
    the files by the last check. That check began in step ``look_step``, at ``look_began_s``, and
    its result was taken in step ``result_step``. ``look``: the check that is running, and how long
    it took. ``slow``: the last check took longer than a step may wait, or the one that is running
    was waited for in vain."""

    read: tuple[NamedAdapter, set[str]] | None = None
    apart: bool = False
    files: str = ""
    look_step: int = -1
    look_began_s: float = 0.0
    result_step: int = -1
    look: Future[tuple[str, float]] | None = None
    slow: bool = False


class Adapters:
    """The LoRA adapters of one engine that has ``ranks`` ranks. Used from its scheduler thread
    only. ``settings``: the engine's settings that change what an adapter computes.
    ``several_nodes``: its ranks may be on several machines."""

    def __init__(self, ranks: int = 1, settings: str = "", *, several_nodes: bool = False) -> None:
        self.step = 0
        """The last step that was planned (``StepWork.number``)."""
        self._ranks = ranks
        self._settings = settings
        self._several_nodes = several_nodes
        self._ids: dict[int, AdapterState] = {}
        self._paths: dict[str, PathState] = {}
        self._texts: dict[str, bytes] = {}
        """The salt that a text stands for. Empty: more than one, or an unknown one."""
        self._left_s = WAIT_S

    # ------------------------------------------------------------ events

    def new_step(self, number: int) -> None:
        """Step ``number`` is planned. Renew the time that a step may wait for the file system."""
        self.step = number
        self._left_s = WAIT_S

    def track(self, adapter: Adapter) -> None:
        """A request with this adapter begins."""
        if adapter.id not in self._ids and len(self._ids) >= MAX_KNOWN:
            self._ids = {number: state for number, state in self._ids.items() if state.held}
        state = self._ids.setdefault(adapter.id, self._unheld())
        if len(state.texts) < MAX_KNOWN:
            state.texts.add(adapter.text)
        self._may_compute(adapter.text, state)

    def reported(self, news: Mapping[int, News]) -> None:
        """Take in what the ranks hold now. ``news``: the changes up to one step, of all ranks, by
        rank."""
        for rank, changes in news.items():
            for number, held in changes.items():
                self._ids.setdefault(number, self._unheld()).ranks[rank] = held
        for number in {number for changes in news.values() for number in changes}:
            state = self._ids[number]
            self._update_named(number, state)
            for text in state.texts:
                self._may_compute(text, state)

    def emptied(self) -> None:
        """The engine's own prefix cache was emptied."""
        self._texts.clear()
        for state in self._ids.values():
            for text in state.texts:
                self._may_compute(text, state)

    # ------------------------------------------------------------ salts

    def to_load(self, adapter: Adapter) -> NamedAdapter | NoSalt:
        """The adapter whose salt is mixed into the hashes of a lookup, or why there is none."""
        state, path = self._ids.get(adapter.id), self._paths.get(adapter.path)
        if adapter.in_place or state is None or path is None or path.read is None:
            return NoSalt.UNKNOWN
        named, files = path.read
        digests = named.held.digests
        other = state.held and tuple(one.digest for one in state.ranks) != digests
        if other or not self._may_stand_for(adapter.text, named):
            return NoSalt.UNKNOWN
        if not self._look(adapter.path, path):
            late = path.look is None or time.monotonic() - path.look_began_s > PATIENCE_S
            return NoSalt.UNKNOWN if late else NoSalt.PENDING
        if path.files not in files:
            return NoSalt.UNKNOWN
        self._stands_for(adapter.text, named.salt)  # loaded blocks enter the engine's cache, too
        return NamedAdapter(named.salt, AdapterHeld(adapter.id, digests, expected=not state.held))

    def to_store(self, adapter: Adapter) -> NamedAdapter | NoSalt:
        """The adapter whose salt is mixed into the hashes of an offer, or why there is none. The
        ranks check it again: they refuse to store what other weights computed."""
        state = self._ids.get(adapter.id)
        if adapter.in_place or self._texts.get(adapter.text) == b"":
            return NoSalt.NEVER
        if state is None or state.named is None:
            return NoSalt.PENDING
        return state.named if self._may_stand_for(adapter.text, state.named) else NoSalt.UNKNOWN

    # ------------------------------------------------------------ texts and salts

    def _unheld(self) -> AdapterState:
        return AdapterState([Held(-1, GONE)] * self._ranks)

    def _update_named(self, number: int, state: AdapterState) -> None:
        """A rank holds other weights under id ``number``. If all ranks agree now, set ``named`` and
        what was read from each path."""
        if not self._agreed(state):
            return
        digests = tuple(one.digest for one in state.ranks)
        salt = bytes.fromhex(identity.digest([self._settings, *digests]))
        state.named = NamedAdapter(salt, AdapterHeld(number, digests))
        for path in {one.path for one in state.ranks} - {""}:
            if path not in self._paths and len(self._paths) >= MAX_KNOWN:
                self._paths = {p: s for p, s in self._paths.items() if s.look is not None}
            known = self._paths.setdefault(path, PathState())
            states = {one.files for one in state.ranks if one.path == path}
            files = {same_files(one) for one in states}
            if self._several_nodes and len(files - {""}) > 1 and not known.apart:
                known.apart = True
                log.warning(APART, path)
            whole = len(files) == 1 and all(one.path == path and one.files for one in state.ranks)
            known.read = (state.named, states) if whole else None

    def _agreed(self, state: AdapterState) -> bool:
        """Whether all ranks hold weights with a digest, since the same step."""
        unnamed = {GONE, UNKNOWN} & {one.digest for one in state.ranks}
        return not unnamed and len({one.since for one in state.ranks}) == 1

    def _may_compute(self, text: str, state: AdapterState) -> None:
        """From now on the ranks may compute requests of ``text`` with the weights that they hold
        now."""
        if self._agreed(state):
            assert state.named is not None, "_update_named set it when the ranks agreed"
            self._stands_for(text, state.named.salt)
        elif state.held:
            self._stands_for(text, b"")

    def _stands_for(self, text: str, salt: bytes) -> None:
        """Note that ``text`` stands for ``salt``. Empty: for weights without a digest."""
        known = self._texts.get(text)
        if known is None and len(self._texts) >= MAX_KNOWN:
            return  # there are too many texts: requests with this one run uncached
        if known in (None, salt) and salt:
            self._texts[text] = salt
        elif known != b"":
            self._texts[text] = b""
            log.warning(
                "requests of LoRA adapter %s run uncached until reset_prefix_cache(): %s",
                text,
                "its weights changed while the engine ran, and the engine's own prefix cache may "
                "have blocks of both"
                if salt
                else "what the ranks hold of it cannot be named",
            )
        if known is None and len(self._texts) == MAX_KNOWN:
            log.warning(
                "requests of other LoRA adapters than the first %d run uncached until "
                "reset_prefix_cache()",
                MAX_KNOWN,
            )

    def _may_stand_for(self, text: str, named: NamedAdapter) -> bool:
        """Whether ``text`` stands for ``named``, or is new and can be remembered."""
        known = self._texts.get(text)
        return known == named.salt or (known is None and len(self._texts) < MAX_KNOWN)

    # ------------------------------------------------------------ files

    def _look(self, path: str, state: PathState) -> bool:
        """Check the files at ``path``, unless a recent result is valid. True: ``state.files`` is
        valid now. After a check of a path that took longer than a step may wait, no step waits for
        the next one. Its lookups stay pending until that ends."""
        self._take_result(state)
        if state.look is None and not self._is_current(state):
            state.look_step, state.look_began_s = self.step, time.monotonic()
            state.look = on_thread("kvass-adapter", _timed, path)
        if state.look is not None and not state.slow:
            began_s = time.monotonic()
            try:
                state.look.exception(self._left_s)
            except TimeoutError:
                state.slow = True
            self._left_s = max(0.0, self._left_s - (time.monotonic() - began_s))
            self._take_result(state)
        return state.look is None and self._is_current(state)

    def _is_current(self, state: PathState) -> bool:
        """Whether the result of the last check is valid."""
        age_s = time.monotonic() - state.look_began_s
        in_step = state.look_step == self.step or (
            state.result_step == self.step and age_s <= PATIENCE_S
        )
        return state.result_step >= 0 and (in_step or age_s <= RECENT_S)

    def _take_result(self, state: PathState) -> None:
        """Take the result of the running check, if it has ended."""
        if state.look is not None and state.look.done():
            look, state.look = state.look, None
            state.files, took_s = ("", 0.0) if look.exception() else look.result()
            state.slow, state.result_step = took_s > WAIT_S, self.step


def _timed(path: str) -> tuple[str, float]:
    """``files_state``, and how long it took."""
    began_s = time.monotonic()
    return files_state(path), time.monotonic() - began_s
