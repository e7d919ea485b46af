"""LoRA adapters in random histories: no request loads KV that other weights computed.

Two engines share rows. Folders are replaced, ids stand for other adapters, adapters are evicted,
loaded again and loaded in place, ranks read a folder at different times, and reports come late. The
engine's own prefix cache is as simple as vLLM's: it knows an adapter by a text.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvass.engine import adapters, held_adapters, identity
from kvass.engine.adapters import Adapters, Named
from kvass.engine.held_adapters import HeldAdapters, News
from kvass.engine.protocols import Adapter
from tests.support.vllm.lora_ranks import LoraRanks

SEEDS = range(12)
REQUESTS = 150
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

    def request(self, adapter: Adapter, prompt: int, torn: Callable[[], None] | None) -> None:
        """A request of one step. ``torn`` happens between the ranks' reads of its folder."""
        self.known.track(adapter)
        loaded = self._load(adapter, prompt)
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

    def _load(self, adapter: Adapter, prompt: int) -> Contents | None:
        named = self.known.to_load(adapter, self.known.step)
        if not isinstance(named, Named):
            return None
        may = self.ranks.may_load(SimpleNamespace(adapter=named.held))
        return self.rows.get((named.salt, prompt)) if may else None

    def _use(self, adapter: Adapter, torn: Callable[[], None] | None) -> Contents:
        lora = SimpleNamespace(
            lora_int_id=adapter.id, lora_path=adapter.path, load_inplace=adapter.in_place
        )
        first, second = self.ranks.managers
        first.use(lora)
        if torn is not None:
            torn()
        second.use(lora)
        return first.held[adapter.id].content, second.held[adapter.id].content

    def _store(self) -> None:
        due = [one for one in self._waiting if one.due <= self.number]
        self._waiting = [one for one in self._waiting if one.due > self.number]
        for one in due:
            named = self.known.to_store(one.adapter)
            if isinstance(named, Named):
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
        name = paths.index(path) + 1 if rng.random() < 0.9 else rng.randrange(1, 4)
        adapter = Adapter(name, str(path), str(path), rng.random() < 0.05)
        torn = (lambda path=path: write(path)) if rng.random() < 0.03 else None
        engine.request(adapter, prompt, torn)
    return sum(one.hits for one in engines), sum(one.wrong for one in engines)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "WAIT_S", 60.0)
    monkeypatch.setattr(adapters, "SETTLED_NS", 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_hit_is_of_other_weights(seed: int, tmp_path: Path) -> None:
    hits, wrong = play(seed, tmp_path)
    assert hits > 5
    assert wrong == 0


def _by_first_rank(self: Any, number: int, state: Any) -> Named | None:
    named = REAL_NAMED(self, number, state)
    return named and Named(bytes.fromhex(identity.digest([named.held.digests[0]])), named.held)


def _by_id(self: Any, number: int) -> None:
    for name, held in self._listed().items():
        if name not in self._objects:
            self._objects[name] = held
            self._note(name, number, self._digest(held))


def _bind_at_once(self: Any, path: str, named: Named, since: int) -> None:
    self._paths.setdefault(path, adapters.PathState()).expected = named, adapters.files_state(path)


REAL_NAMED = Adapters._named
MUTANTS: dict[str, tuple[type, str, Any]] = {
    "a rank refuses no load": (HeldAdapters, "may_load", lambda *_: True),
    "a rank refuses no store": (HeldAdapters, "computed", lambda *_: True),
    "the first rank names it for all": (Adapters, "_named", _by_first_rank),
    "what has the id of before is what it was": (HeldAdapters, "look", _by_id),
    "a text may stand for several": (Adapters, "_unambiguous", lambda self, adapter, named: named),
    "files are not looked at before": (Adapters, "_begin_to_bind", _bind_at_once),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_rule_is_needed(mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[mutant])
    wrong = 0
    for seed in range(60):
        wrong += play(seed, tmp_path / str(seed))[1]
        if wrong:
            return
    raise AssertionError("nothing noticed it")


def test_files_that_look_alike_are_not_taken_for_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of ``files_state``: without it an adapter that was evicted has its old name."""
    monkeypatch.setattr(adapters, "files_state", lambda path: "always")
    assert sum(play(seed, tmp_path / str(seed))[1] for seed in range(10))


def test_what_cannot_be_read_has_no_name() -> None:
    state, adapter = Adapters(), Adapter(1, "/a", "a")
    state.track(adapter)
    state.reported({0: {1: (1, held_adapters.UNKNOWN)}})
    assert not isinstance(state.to_load(adapter, 0), Named)
    assert not isinstance(state.to_store(adapter), Named)
