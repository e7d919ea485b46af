"""The scheduler's half of LoRA adapters: what to mix into the chunk hashes of their requests.

Engines hash an adapter's name and path, and serve it by an id. What lies at the path may change,
and so may what the id stands for. So the ranks tell what they hold (``held_adapters.py``).

Laws of this file:

- An adapter is named by the weights that all ranks hold, since the same step, and by nothing else.
- Each load and store carries what every rank must hold. A rank that does not hold it refuses.
- An engine's own prefix cache knows an adapter by a text. If a text stood for two names since that
  cache was emptied, it may have blocks of both: its requests run uncached until it is emptied.
- A rank may read an adapter again before it computes a request. So a load needs the files to be in
  the state in which all ranks last read from there, before and after reading, and only the name of
  what they read then is expected.
- Only threads of this file touch the file system. A step waits for them at most ``WAIT_S``. A path
  has one look under way at a time.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

from kvass.engine import identity
from kvass.engine.adapter_files import files_state
from kvass.engine.boundary import log, on_thread
from kvass.engine.held_adapters import GONE, UNKNOWN, Held, News
from kvass.engine.protocols import Adapter
from kvass.engine.step_work import AdapterHeld

WAIT_S: Final = 0.005
"""How long a step may wait for the file system, for all its requests together."""
RECENT_S: Final = 0.05
"""A look in an earlier step counts as long as this from its beginning."""
PATIENCE_S: Final = 0.25
"""A look that takes longer counts for nothing, and no request is told to ask again for it."""
MAX_KNOWN: Final = 10_000
"""Texts, ids and paths. A text that is new when so many are known runs uncached."""


class NoSalt(enum.Enum):
    """Why an adapter's requests cannot be cached."""

    PENDING = "it will be known soon: ask again"
    UNKNOWN = "not known at present"
    NEVER = "nor will it be while this request lives"


@dataclass(frozen=True)
class Named:
    """An adapter's weights. ``salt`` is equal for equal weights in any engine of this namespace."""

    salt: bytes
    held: AdapterHeld


@dataclass
class AdapterState:
    """What is known of one id. ``ranks``: what each holds. ``named``: the last name that all ranks
    agreed on. ``texts``: of its requests."""

    ranks: list[Held]
    named: Named | None = None
    texts: set[str] = field(default_factory=set)

    @property
    def held(self) -> bool:
        """Whether some rank may hold it."""
        return any(one.digest != GONE for one in self.ranks)


@dataclass
class PathState:
    """What is known of one path. ``read``: the weights that all ranks last read from there, and the
    state of the files. ``files``: their state by the last look, which began in step ``asked``, at
    ``asked_s``, and was taken in in step ``seen``. ``look``: it is under way."""

    read: tuple[Named, str] | None = None
    files: str = ""
    asked: int = -1
    asked_s: float = 0.0
    seen: int = -1
    look: Future[str] | None = None
    slow: bool = False


class Adapters:
    """The adapters of one engine that has ``ranks`` ranks. Used from its scheduler thread only.
    ``settings`` are those of the engine that change what an adapter computes."""

    def __init__(self, ranks: int = 1, settings: str = "") -> None:
        self.step = 0
        """The last step that was planned (``StepWork.number``)."""
        self._ranks = ranks
        self._settings = settings
        self._ids: dict[int, AdapterState] = {}
        self._paths: dict[str, PathState] = {}
        self._texts: dict[str, bytes] = {}
        """The name that a text stands for; empty: several."""
        self._left_s = WAIT_S

    # ------------------------------------------------------------ what happens

    def new_step(self, number: int) -> None:
        """Step ``number`` is planned: files may change, and the next step may wait anew."""
        self.step = number
        self._left_s = WAIT_S

    def track(self, adapter: Adapter) -> None:
        """A request with this adapter begins."""
        if adapter.id not in self._ids and len(self._ids) >= MAX_KNOWN:
            self._ids = {number: state for number, state in self._ids.items() if state.held}
        state = self._ids.setdefault(adapter.id, self._unheld())
        if len(state.texts) < MAX_KNOWN:
            state.texts.add(adapter.text)
        self._computes(adapter.text, state)

    def reported(self, news: Mapping[int, News]) -> None:
        """What ranks hold since a step, by rank: the news of all ranks of one step."""
        for rank, changes in news.items():
            for number, held in changes.items():
                self._ids.setdefault(number, self._unheld()).ranks[rank] = held
        for number in {number for changes in news.values() for number in changes}:
            state = self._ids[number]
            self._name(number, state)
            for text in state.texts:
                self._computes(text, state)

    def emptied(self) -> None:
        """The engine's own prefix cache is empty."""
        self._texts.clear()
        for state in self._ids.values():
            for text in state.texts:
                self._computes(text, state)

    # ------------------------------------------------------------ what is asked

    def to_load(self, adapter: Adapter) -> Named | NoSalt:
        """What to mix into the hashes of a lookup."""
        state, path = self._ids.get(adapter.id), self._paths.get(adapter.path)
        if adapter.in_place or state is None or path is None or path.read is None:
            return NoSalt.UNKNOWN
        named, files = path.read
        digests = named.held.digests
        other = state.held and tuple(one.digest for one in state.ranks) != digests
        if other or not self._may_stand_for(adapter.text, named):
            return NoSalt.UNKNOWN
        if not self._look(adapter.path, path):
            late = path.look is None or time.monotonic() - path.asked_s > PATIENCE_S
            return NoSalt.UNKNOWN if late else NoSalt.PENDING
        if path.files != files:
            return NoSalt.UNKNOWN
        self._stands_for(adapter.text, named.salt)  # what is loaded is in the engine's cache, too
        return Named(named.salt, AdapterHeld(adapter.id, digests, expected=not state.held))

    def to_store(self, adapter: Adapter) -> Named | NoSalt:
        """What to mix into the hashes of an offer. The rank still refuses what another computed."""
        state = self._ids.get(adapter.id)
        if adapter.in_place or self._texts.get(adapter.text) == b"":
            return NoSalt.NEVER
        if state is None or state.named is None:
            return NoSalt.PENDING
        return state.named if self._may_stand_for(adapter.text, state.named) else NoSalt.UNKNOWN

    # ------------------------------------------------------------ names

    def _unheld(self) -> AdapterState:
        return AdapterState([Held(-1, GONE)] * self._ranks)

    def _name(self, number: int, state: AdapterState) -> None:
        """A rank holds something else: name it, if all ranks have it since the same step."""
        if not self._agreed(state):
            return
        digests = tuple(one.digest for one in state.ranks)
        salt = bytes.fromhex(identity.digest([self._settings, *digests]))
        state.named = Named(salt, AdapterHeld(number, digests))
        for path in {one.path for one in state.ranks} - {""}:
            if path not in self._paths and len(self._paths) >= MAX_KNOWN:
                self._paths = {p: s for p, s in self._paths.items() if s.look is not None}
            files = {one.files for one in state.ranks if one.path == path}
            whole = len(files) == 1 and all(one.path == path and one.files for one in state.ranks)
            read = (state.named, files.pop()) if whole else None
            self._paths.setdefault(path, PathState()).read = read

    def _agreed(self, state: AdapterState) -> bool:
        """Whether all ranks hold it, since the same step, and it can be named."""
        unnamed = {GONE, UNKNOWN} & {one.digest for one in state.ranks}
        return not unnamed and len({one.since for one in state.ranks}) == 1

    def _computes(self, text: str, state: AdapterState) -> None:
        """What the ranks hold may compute requests of ``text`` from now on."""
        if self._agreed(state):
            assert state.named is not None, "it was named when they agreed"
            self._stands_for(text, state.named.salt)
        elif state.held:
            self._stands_for(text, b"")

    def _stands_for(self, text: str, salt: bytes) -> None:
        known = self._texts.get(text)
        if known is None and len(self._texts) >= MAX_KNOWN:
            return  # it stays without a meaning
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

    def _may_stand_for(self, text: str, named: Named) -> bool:
        """Whether ``text`` stands for ``named``, or for nothing yet."""
        known = self._texts.get(text)
        return known == named.salt or (known is None and len(self._texts) < MAX_KNOWN)

    # ------------------------------------------------------------ files

    def _look(self, path: str, state: PathState) -> bool:
        """Look at the files, unless that was done just now; whether it is known what is there. A
        path that takes longer than a step may wait is not waited for again: its requests are asked
        again in later steps."""
        self._collect(state)
        if state.look is None and not self._counts(state):
            state.asked, state.asked_s = self.step, time.monotonic()
            state.look = on_thread("kvass-adapter", files_state, path)
        if state.look is not None and not state.slow:
            began_s = time.monotonic()
            try:
                state.look.exception(self._left_s)
            except TimeoutError:
                state.slow = True
            self._left_s = max(0.0, self._left_s - (time.monotonic() - began_s))
            self._collect(state)
        return state.look is None and self._counts(state)

    def _counts(self, state: PathState) -> bool:
        """Whether the last look says what is there now."""
        age_s = time.monotonic() - state.asked_s
        in_step = state.asked == self.step or (state.seen == self.step and age_s <= PATIENCE_S)
        return state.seen >= 0 and (in_step or age_s <= RECENT_S)

    def _collect(self, state: PathState) -> None:
        """Take the result of the look under way, if it is there."""
        if state.look is not None and state.look.done():
            look, state.look = state.look, None
            state.files = "" if look.exception() else look.result()
            state.seen = self.step
