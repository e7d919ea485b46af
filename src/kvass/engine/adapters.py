"""The scheduler's half of LoRA adapters: what to mix into the chunk hashes of their requests.

Engines hash an adapter's name and path, and serve it by an id. What lies at the path may change,
and so may what the id stands for. So the ranks tell what they hold (``held_adapters.py``).

Laws of this file:

- An adapter is named by the weights that all ranks hold, since the same step, and by nothing else.
- Each load and store carries what every rank must hold. A rank that does not hold it refuses.
- An engine's own prefix cache knows an adapter by a text. If a text stood for two names since that
  cache was emptied, it may have blocks of both: its requests run uncached until it is emptied.
- An adapter that no rank holds will be read from its files again. The name that it had before is
  expected only if the files are in the state in which they were before and after it was read.
- Only threads of this file touch the file system. A step waits for them at most ``WAIT_S``. A path
  has one look under way at a time.
"""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvass.engine import identity
from kvass.engine.boundary import log, on_thread
from kvass.engine.held_adapters import GONE, UNKNOWN, News
from kvass.engine.protocols import Adapter
from kvass.engine.step_work import AdapterHeld

WAIT_S: Final = 0.005
"""How long a step may wait for the file system, for all its requests together."""
PATIENCE_S: Final = 0.25
"""How long a request may be told to ask again because of one look."""
SETTLED_NS: Final = 100_000_000
"""A file that changed later than this before a look may have changed twice at one time."""
MAX_ENTRIES: Final = 1000
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
    """What is known of one id. ``ranks``: by rank, since which step it holds which digest.
    ``named``: the last name that all ranks agreed on. ``texts`` and ``paths``: of its requests."""

    ranks: list[tuple[int, str]]
    named: Named | None = None
    texts: set[str] = field(default_factory=set)
    paths: set[str] = field(default_factory=set)

    @property
    def held(self) -> bool:
        """Whether some rank may hold it."""
        return any(digest != GONE for _, digest in self.ranks)


@dataclass
class PathState:
    """What is known of one path. ``files``: their state by the last look that has answered, which
    was taken in before step ``seen``; empty: unknown. ``look``: under way since step ``asked``.
    ``loading``: the name to expect if the look shows ``files`` again. ``expected``: a name, and the
    state of the files that it was read from."""

    files: str = ""
    seen: int = -1
    look: Future[str] | None = None
    asked: int = -1
    asked_s: float = 0.0
    slow: bool = False
    loading: Named | None = None
    expected: tuple[Named, str] | None = None


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
        for path, state in self._paths.items():
            if state.loading is not None:
                self._bind(path, state)

    def track(self, adapter: Adapter) -> None:
        """A request with this adapter begins."""
        if adapter.id not in self._ids:
            self._forget_some()
        state = self._ids.setdefault(adapter.id, self._unheld())
        if len(state.texts) < MAX_KNOWN:
            state.texts.add(adapter.text)
        if len(state.paths) < 2:
            state.paths.add(adapter.path)
        if state.held and state.named is not None:
            self._stands_for(adapter.text, state.named.salt)

    def reported(self, news: Mapping[int, News]) -> None:
        """What ranks hold since a step, by rank: the news of all ranks of one step."""
        for rank, changes in news.items():
            for number, changed in changes.items():
                state = self._ids.setdefault(number, self._unheld())
                state.ranks[rank] = changed
        for number in {number for changes in news.values() for number in changes}:
            self._agree(number, self._ids[number])

    def emptied(self) -> None:
        """The engine's own prefix cache is empty."""
        self._texts.clear()
        for state in self._ids.values():
            if state.held and state.named is not None:
                for text in state.texts:
                    self._stands_for(text, state.named.salt)

    # ------------------------------------------------------------ what is asked

    def to_load(self, adapter: Adapter, since: int) -> Named | NoSalt:
        """What to mix into the hashes of a lookup. ``since``: after which step it was first asked
        for; an older look at files does not count."""
        state = self._ids.get(adapter.id)
        if adapter.in_place or state is None:
            return NoSalt.UNKNOWN
        if state.held:
            digests = {digest for _, digest in state.ranks}
            named = None if digests & {GONE, UNKNOWN} else self._named(adapter.id, state)
            return self._unambiguous(adapter, named) or NoSalt.UNKNOWN
        path = self._paths.setdefault(adapter.path, PathState())
        known = path.expected is not None and self._unambiguous(adapter, path.expected[0])
        self._look(adapter.path, path, since)
        if path.look is not None:
            waits = known and time.monotonic() - path.asked_s < PATIENCE_S
            return NoSalt.PENDING if waits else NoSalt.UNKNOWN
        if path.expected is None or not known or path.expected[1] != path.files:
            return NoSalt.UNKNOWN
        named, _ = path.expected
        return Named(named.salt, AdapterHeld(adapter.id, named.held.digests, expected=True))

    def to_store(self, adapter: Adapter) -> Named | NoSalt:
        """What to mix into the hashes of an offer. The rank still refuses what another computed."""
        state = self._ids.get(adapter.id)
        if adapter.in_place or self._texts.get(adapter.text) == b"":
            return NoSalt.NEVER
        if state is None or state.named is None:
            return NoSalt.PENDING
        return self._unambiguous(adapter, state.named) or NoSalt.UNKNOWN

    # ------------------------------------------------------------ names

    def _unheld(self) -> AdapterState:
        return AdapterState([(-1, GONE)] * self._ranks)

    def _agree(self, number: int, state: AdapterState) -> None:
        """A rank holds something else: name it, if all ranks have it since the same step."""
        if any(digest == UNKNOWN for _, digest in state.ranks):
            for text in state.texts:
                self._stands_for(text, b"")
        named = self._named(number, state)
        if named is None:
            return
        state.named = named
        for text in state.texts:
            self._stands_for(text, named.salt)
        if len(state.paths) == 1:
            (path,) = state.paths
            self._begin_to_bind(path, named, state.ranks[0][0])

    def _named(self, number: int, state: AdapterState) -> Named | None:
        """The name of what all ranks hold; None if they do not agree, or it has none."""
        digests = tuple(digest for _, digest in state.ranks)
        if len({since for since, _ in state.ranks}) > 1 or {GONE, UNKNOWN} & set(digests):
            return None
        held = AdapterHeld(number, digests)
        if state.named is not None and state.named.held == held:
            return state.named
        return Named(bytes.fromhex(identity.digest([self._settings, *digests])), held)

    def _stands_for(self, text: str, salt: bytes) -> None:
        known = self._texts.get(text)
        if known is None and len(self._texts) >= MAX_KNOWN:
            return  # it stays without a meaning
        if known is None or known == salt:
            self._texts[text] = salt
        elif known:
            self._texts[text] = b""
            log.warning(
                "requests of LoRA adapter %s run uncached until reset_prefix_cache(): its weights "
                "changed while the engine ran, and its own prefix cache may have blocks of both",
                text,
            )

    def _unambiguous(self, adapter: Adapter, named: Named | None) -> Named | None:
        """``named``, unless the adapter's text may stand for something else."""
        if named is None:
            return None
        known = self._texts.get(adapter.text)
        if known is None and len(self._texts) < MAX_KNOWN:
            return named
        return named if known == named.salt else None

    def _forget_some(self) -> None:
        """Make room for one more id and path: what is not held has no name then until it is."""
        if len(self._ids) >= MAX_KNOWN:
            self._ids = {number: state for number, state in self._ids.items() if state.held}
        if len(self._paths) >= MAX_KNOWN:
            self._paths.clear()

    # ------------------------------------------------------------ files

    def _begin_to_bind(self, path: str, named: Named, since: int) -> None:
        """All ranks hold ``named`` since step ``since``, read from ``path``: look whether the files
        are now what they were before that step."""
        state = self._paths.setdefault(path, PathState())
        self._collect(state)
        if state.expected is not None and state.expected[0].salt == named.salt:
            return
        state.expected = None
        if state.files and state.seen < since and state.look is None:
            state.loading = named
            self._begin_look(path, state)

    def _bind(self, path: str, state: PathState) -> None:
        before, named = state.files, state.loading
        self._collect(state)
        if state.look is None and named is not None:
            state.loading = None
            if before == state.files:
                state.expected = named, before

    def _look(self, path: str, state: PathState, since: int) -> None:
        """Look at the files, unless that was done since step ``since``; wait what is left of this
        step's time. A path that takes longer is not waited for again: its requests are asked again
        in later steps."""
        self._bind(path, state) if state.loading is not None else self._collect(state)
        if state.look is None and state.asked < since:
            self._begin_look(path, state)
        if state.look is None or state.slow:
            return
        began_s = time.monotonic()
        try:
            state.look.exception(self._left_s)
        except TimeoutError:
            state.slow = True
        self._left_s = max(0.0, self._left_s - (time.monotonic() - began_s))
        self._bind(path, state) if state.loading is not None else self._collect(state)

    def _begin_look(self, path: str, state: PathState) -> None:
        state.asked, state.asked_s = self.step, time.monotonic()
        state.look = on_thread("kvass-adapter", files_state, path)

    def _collect(self, state: PathState) -> None:
        """Take the result of the look under way, if it is there."""
        if state.look is not None and state.look.done():
            look, state.look = state.look, None
            state.files = "" if look.exception() else look.result()
            state.seen = self.step


def files_state(path: str) -> str:
    """A text that changes with what lies at ``path``: with any file in this folder, and with links
    on the way. Empty if one of them changed just now. Raises OSError if there is nothing."""
    folder = Path(os.path.expanduser(path))  # as engines do
    files = sorted(folder.iterdir())
    if len(files) > MAX_ENTRIES:
        return ""
    states = [file.stat() for file in (folder, *files)]
    states += [p.lstat() for p in (folder, *folder.parents, *files) if p.is_symlink()]
    if max(s.st_ctime_ns for s in states) > time.time_ns() - SETTLED_NS:
        return ""
    parts = [os.path.realpath(folder), *(file.name for file in files)]
    parts += [str((s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)) for s in states]
    return identity.digest(parts)
