"""LoRA adapters in random histories: no request loads KV that other weights computed.

Two engines share rows. Folders are replaced, ids stand for other adapters, adapters are evicted,
loaded again and loaded in place, ranks read a folder at different times, and reports come late. The
engine's own prefix cache is as simple as vLLM's: it knows an adapter by a text.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvass.connectors.vllm import lora
from kvass.engine import adapter_files, adapters, identity
from kvass.engine.adapters import APART, Adapters, NamedAdapter, NoSalt
from kvass.engine.boundary import Boundary
from kvass.engine.held_adapters import GONE, UNKNOWN, Held, HeldAdapters, News
from kvass.engine.protocols import Adapter
from tests.support.vllm.lora_ranks import LoraManager, LoraRanks
from tests.support.waiting import eventually

SEEDS = range(12)
REQUESTS = 200
Contents = tuple[str, ...]


@dataclass
class Waiting:
    """A store that is planned some steps after ``number``, which computed its KV."""

    adapter: Adapter
    prompt: int
    kv: Contents
    number: int
    due: int


@dataclass
class Engine:
    """An engine of two ranks. ``local`` is its own prefix cache, ``rows`` are those of all."""

    rng: random.Random
    rows: dict[tuple[bytes, int], Contents]
    capacity: int
    local: dict[tuple[str, int], Contents] = field(default_factory=dict)
    number: int = 0
    hits: int = 0
    wrong: int = 0

    def __post_init__(self) -> None:
        self.known = Adapters(2)
        self.ranks = LoraRanks(2, self.capacity)
        self._reports: list[tuple[int, dict[int, News]]] = []
        self._waiting: list[Waiting] = []

    def begin(self, adapter: Adapter, prompt: int) -> Contents | None:
        """A request is looked up: what it loads."""
        self.known.track(adapter)
        named = self.known.to_load(adapter)
        if (adapter.text, prompt) in self.local or not isinstance(named, NamedAdapter):
            return None
        may = self.ranks.may_load(SimpleNamespace(adapter=named.held))
        return self.rows.get((named.salt, prompt)) if may else None

    def compute(
        self,
        adapter: Adapter,
        prompt: int,
        loaded: Contents | None,
        torn: Callable[[], None] | None = None,
    ) -> None:
        """The step that computes it. ``torn`` happens while the second rank reads its folder."""
        self.number += 1
        self.known.new_step(self.number)
        self._store()
        held = self._use(adapter, torn)
        kv = self.local.get((adapter.text, prompt), loaded or held)
        if loaded is not None and (adapter.text, prompt) not in self.local:
            self.hits += 1
            self.wrong += loaded != held
        self.local[adapter.text, prompt] = kv
        due = self.number + self.rng.randrange(3)
        self._waiting.append(Waiting(adapter, prompt, kv, self.number, due))
        self._report()

    def reset(self) -> None:
        """The engine's own prefix cache is emptied; nothing is on its way then."""
        self._waiting.clear()
        self.local.clear()
        self.known.emptied()

    def add_lora(self, number: int, path: Path) -> None:
        """The ranks load it in place, as a server that is told to, for no request."""
        lora = SimpleNamespace(lora_int_id=number, lora_path=str(path), load_inplace=True)
        for manager in self.ranks.managers:
            manager.use(lora)

    def _use(self, adapter: Adapter, torn: Callable[[], None] | None) -> Contents:
        lora = SimpleNamespace(
            lora_int_id=adapter.id, lora_path=adapter.path, load_inplace=adapter.in_place
        )
        first, second = self.ranks.managers
        if torn is not None and self.rng.random() < 0.5:  # after both have read, before they look
            second.read = _then(second.read, torn)  # type: ignore[assignment, method-assign]
            first.read = _then(first.read, lambda: second.use(lora))  # type: ignore[assignment, method-assign]
        first.use(lora)
        if torn is not None and "read" not in vars(first):
            torn()
        second.use(lora)
        for manager in self.ranks.managers:
            vars(manager).pop("read", None)
        return first.held[adapter.id].content, second.held[adapter.id].content

    def _store(self) -> None:
        due = [one for one in self._waiting if one.due <= self.number]
        self._waiting = [one for one in self._waiting if one.due > self.number]
        for one in due:
            named = self.known.to_store(one.adapter)
            if isinstance(named, NamedAdapter):
                store = SimpleNamespace(
                    adapter=named.held, first_step=one.number, computed=one.number
                )
                if self.ranks.may_store(store):
                    self.rows[named.salt, one.prompt] = one.kv

    def _report(self) -> None:
        self._reports.append(
            (self.number + self.rng.randrange(2), self.ranks.compute([], self.number))
        )
        while self._reports and self._reports[0][0] <= self.number:
            self.known.reported(self._reports.pop(0)[1])


def _then(read: Callable[[Path], Any], then: Callable[[], None]) -> Callable[[Path], Any]:
    """``read``, after which something happens."""

    def both(folder: Path) -> Any:
        found = read(folder)
        then()
        return found

    return both


def play(seed: int, folder: Path) -> tuple[int, int]:
    """Hits of a history, and those that were wrong."""
    rng = random.Random(seed)
    paths = [folder / str(number) for number in range(3)]
    for path in paths:
        path.mkdir(parents=True)

    def write(path: Path) -> None:
        new = path / "new"
        new.write_text(f"{rng.randrange(6)}")
        os.replace(new, path / "adapter_model.safetensors")

    for path in paths:
        write(path)
    rows: dict[tuple[bytes, int], Contents] = {}
    engines = [Engine(rng, rows, capacity) for capacity in (1, 3)]
    for _ in range(REQUESTS):
        engine, path, prompt = rng.choice(engines), rng.choice(paths), rng.randrange(3)
        if rng.random() < 0.06:
            write(rng.choice(paths))
        if rng.random() < 0.1:
            engine.reset()
        if rng.random() < 0.05:
            engine.add_lora(rng.randrange(1, 4), rng.choice(paths))
        name = paths.index(path) + 1 if rng.random() < 0.9 else rng.randrange(1, 4)
        adapter = Adapter(name, str(path), str(path), rng.random() < 0.05)
        loaded = engine.begin(adapter, prompt)
        # What is replaced between a load and the step that computes is not seen (decision 033).
        tears = loaded is None and rng.random() < 0.05
        torn = (lambda path=path: write(path)) if tears else None
        if rng.random() < 0.3:  # another one is computed before
            other = paths[name % 3]
            between = Adapter(name % 3 + 1, str(other), str(other))
            engine.compute(between, 3, engine.begin(between, 3))
        engine.compute(adapter, prompt, loaded, torn)
    return sum(one.hits for one in engines), sum(one.wrong for one in engines)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "WAIT_S", 60.0)
    monkeypatch.setattr(adapters, "RECENT_S", -1.0)
    monkeypatch.setattr(adapter_files, "STABLE_NS", 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_hit_is_of_other_weights(seed: int, tmp_path: Path) -> None:
    hits, wrong = play(seed, tmp_path)
    assert hits > 2
    assert wrong == 0


def _by_first_rank(self: Any, number: int, state: Any) -> None:
    REAL_NAME(self, number, state)
    if (named := state.named) is not None:
        salt = bytes.fromhex(identity.digest([named.held.digests[0]]))
        state.named = NamedAdapter(salt, named.held)
        for path in self._paths.values():
            if path.read is not None and path.read[0] is named:
                path.read = state.named, path.read[1]


def _by_id(self: Any, number: int) -> None:
    for name, held in self._listed().items():
        if name not in self._objects:
            self._objects[name] = held
            self._note(name, Held(number, self._digest(held), *self._source(held)))


def _after_reading(manager: Any, boundary: Any) -> Any:
    """As ``lora.sources``, but for the look before."""
    load, known = manager._load_adapter, dict[object, tuple[str, str]]()

    def load_adapter(request: Any) -> Any:
        adapter = load(request)
        known[adapter] = request.lora_path, adapter_files.files_state(request.lora_path)
        return adapter

    manager._load_adapter = load_adapter
    return lambda adapter: known.get(adapter, ("", ""))


def _as_read(self: Any, path: str, state: Any) -> bool:
    state.files = min(state.read[1])
    return True


def _replaces(self: Any, text: str, salt: bytes) -> None:
    self._texts[text] = salt


REAL_NAME = Adapters._update_named
MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "a rank refuses no load": (HeldAdapters, "may_load", lambda *_: True),
    "a rank refuses no store": (HeldAdapters, "computed", lambda *_: True),
    "the first rank names it for all": (Adapters, "_update_named", _by_first_rank),
    "what has the id of before is what it was": (HeldAdapters, "look", _by_id),
    "a text stands for the last alone": (Adapters, "_stands_for", _replaces),
    "files are looked at after reading alone": (lora, "sources", _after_reading),
    "files are what they were": (Adapters, "_look", _as_read),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_rule_is_needed(mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[mutant])
    wrong = 0
    for seed in sorted(range(60), key=lambda seed: seed not in (6, 9)):  # these notice the rarest
        wrong += play(seed, tmp_path / str(seed))[1]
        if wrong:
            return
    raise AssertionError("nothing noticed it")


def test_a_defect_of_ours_ends_no_load_of_the_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    boundary, manager = Boundary(), LoraManager()
    monkeypatch.setattr(lora, "files_state", lambda path: 1 / 0)
    source = lora.sources(manager, boundary)
    manager.use(SimpleNamespace(lora_int_id=1, lora_path=str(tmp_path), load_inplace=False))
    assert source(manager.held[1]) == (str(tmp_path), "")
    assert boundary.counters.total() == 2


def test_what_is_loaded_is_in_the_engines_own_cache_too(tmp_path: Path) -> None:
    """If other weights compute the request after all, nothing of its text is stored any more."""
    state, adapter = Adapters(), Adapter(1, str(tmp_path), "a")
    state.track(adapter)
    state.reported({0: {1: Held(1, "A", str(tmp_path), adapter_files.files_state(str(tmp_path)))}})
    state.reported({0: {1: Held(2, GONE)}})
    state.emptied()
    assert isinstance(state.to_load(adapter), NamedAdapter)
    state.reported({0: {1: Held(4, "B")}})
    assert state.to_store(adapter) is NoSalt.NEVER


def test_what_cannot_be_read_has_no_name_and_gets_none_later() -> None:
    """Blocks that unknown weights computed may be in the engine's own cache."""
    adapter, unknown, good = Adapter(1, "/a", "a"), Held(1, UNKNOWN), Held(2, "digest")
    for order in ("tracked first", "reported first", "emptied between"):
        state = Adapters()
        if order == "tracked first":
            state.track(adapter)
        state.reported({0: {1: unknown}})
        state.track(adapter)
        if order == "emptied between":
            state.emptied()
        state.reported({0: {1: good}})
        assert not isinstance(state.to_store(adapter), NamedAdapter), order
        state.emptied()
        assert isinstance(state.to_store(adapter), NamedAdapter)


@pytest.mark.parametrize("files", [("one", "other"), ("one", "one"), ("one", "")])
def test_machines_with_copies_of_an_adapter_store_and_load_nothing_which_is_said_once(
    files: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """The scheduler sees only the files of its own machine."""
    state = Adapters(2, several_nodes=True)
    for number in (1, 2, 1):
        adapter = Adapter(number, f"/{number}", f"{number}")
        state.track(adapter)
        held = [Held(1, f"weights {rank}", adapter.path, files[rank]) for rank in (0, 1)]
        state.reported({rank: {number: one} for rank, one in enumerate(held)})
        assert isinstance(state.to_store(adapter), NamedAdapter)
        assert state.to_load(adapter) is NoSalt.UNKNOWN
    said = [APART % "/1", APART % "/2"]  # of each adapter once
    assert caplog.messages == said * (files == ("one", "other"))


def test_on_one_machine_nobody_is_told_to_share_a_folder(caplog: pytest.LogCaptureFixture) -> None:
    """The files were touched while the ranks read them."""
    state, adapter = Adapters(2), Adapter(1, "/a", "a")
    state.track(adapter)
    files = "before", "after"
    state.reported({rank: {1: Held(1, "weights", "/a", files[rank])} for rank in (0, 1)})
    assert state.to_load(adapter) is NoSalt.UNKNOWN
    assert caplog.messages == []


@pytest.mark.parametrize("own", [True, False])
def test_machines_that_share_a_folder_load_wherever_each_has_it_mounted_since(
    own: bool, tmp_path: Path
) -> None:
    """Folders above it are each machine's own. The scheduler must see them as a rank saw them."""
    (tmp_path / "adapter.bin").write_text("weights")
    state, adapter = Adapters(2, several_nodes=True), Adapter(1, str(tmp_path), "a")
    assert eventually(lambda: adapter_files.files_state(str(tmp_path)) != "")
    seen = adapter_files.files_state(str(tmp_path))
    content = adapter_files.same_files(seen)
    state.track(adapter)
    files = seen if own else f"{content} 5", f"{content} 7"
    state.reported({rank: {1: Held(1, "A", adapter.path, files[rank])} for rank in (0, 1)})
    deadline_s = time.monotonic() + 60
    while (found := state.to_load(adapter)) is NoSalt.PENDING and time.monotonic() < deadline_s:
        state.new_step(state.step + 1)
    assert isinstance(found, NamedAdapter) == own
