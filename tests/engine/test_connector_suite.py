"""``ConnectorSuite`` passes right connectors, and catches each way of being a wrong one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from examples.toy_engine import PAGE_BYTES, PAGE_TOKENS, Engine, Model, keys_of, main
from kvass import Plane, Put
from kvass.testing import ConnectorSuite, Daemon, EngineUnderTest, RunResult, running_daemon
from kvass.testing.connector_suite import TENANTS, MakeEngine

ROOT = Path(__file__).parent.parent.parent


def aborted(kv: object) -> int:
    raise KeyboardInterrupt


class Toy(EngineUnderTest):
    """The engine of ``examples/toy_engine.py``."""

    chunk_tokens = PAGE_TOKENS
    kind: type[Engine] = Engine

    def __init__(self, socket: str, weights: str, layout: str = "", tenant: str = "") -> None:
        self.engine = (Halves if layout else self.kind)(socket, weights, tenant)

    def run(self, prompt: list[int]) -> RunResult:
        return RunResult(self.engine.generate(prompt), self.engine.loaded)

    def wait_connected(self) -> None:
        assert self.engine.store.wait_connected(10)

    def abort(self, prompt: list[int]) -> None:
        """The model fails after the prompt was loaded and computed."""
        model = self.engine.model
        model.next_token = aborted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            self.engine.generate(prompt)
        del model.next_token

    def clear(self) -> None:
        assert self.engine.store.clear()

    def replace_weights(self, weights: str) -> None:
        self.engine.replace_weights(weights)

    def close(self) -> None:
        self.engine.close()


class Halves(Engine):
    """Its pages are described in halves, so they lie otherwise in a row."""

    def planes(self) -> list[Plane]:
        half = PAGE_BYTES // 2
        return [
            Plane(each.base + at, PAGE_BYTES, half)
            for at in (0, half)
            for each in super(Halves, self).planes()
        ]


class TestToy(ConnectorSuite):
    @pytest.fixture
    def make_engine(self) -> MakeEngine:
        return Toy


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out.splitlines()
    page = (ROOT / "docs" / "connectors.md").read_text().splitlines()
    assert printed == [line for line in page if " tokens were loaded; " in line]
    assert len((ROOT / "examples" / "toy_engine.py").read_text().splitlines()) < 150


# ---------------------------------------------------------------- wrong ones


class NamesNoWeights(Engine):
    def __init__(self, socket: str, weights: str, tenant: str = "") -> None:
        super().__init__(socket, "weights", tenant)
        self.model = Model(weights)


class TakesAHitForWhole(Engine):
    """It uses all pages that it asked for, whatever was loaded."""

    def __init__(self, *setup: str) -> None:
        super().__init__(*setup)
        right = self.store.get

        def get(keys: Sequence[bytes], pages: Sequence[int]) -> int:
            return len(keys) if right(keys, pages) else 0

        self.store.get = get  # type: ignore[method-assign, assignment]


class KeepsItsGeneration(Engine):
    def replace_weights(self, weights: str) -> None:
        self.model = Model(weights)


class ClearsNothing(Toy):
    def clear(self) -> None: ...


class PaysForNobody(Engine):
    def __init__(self, socket: str, weights: str, tenant: str = "") -> None:
        super().__init__(socket, weights, TENANTS[1])


class NeedsADaemon(Engine):
    def generate(self, prompt: list[int], count: int = 4) -> list[int]:
        assert self.store.connected
        return super().generate(prompt, count)


class StoresNothing(Engine):
    def __init__(self, *setup: str) -> None:
        super().__init__(*setup)
        self.store.put = lambda *_: [Put.REFUSED]  # type: ignore


def keys_of_single_pages(tokens: list[int]) -> list[bytes]:
    """Keys that name the tokens of a page, and none of those before it."""
    return [keys_of(tokens[at : at + PAGE_TOKENS])[0] for at in range(0, len(tokens) - 15, 16)]


class _NotChained(Engine):
    """With ``keys_of_single_pages``."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    quota = [f"{tenant}=16MiB" for tenant in TENANTS]
    with running_daemon(tmp_path_factory.mktemp("wrong"), quota=quota) as one:
        yield one


WRONG = [
    (NamesNoWeights, "test_other_weights_share_nothing"),
    (NamesNoWeights, "test_replaced_weights_use_nothing_of_before"),
    (KeepsItsGeneration, "test_replaced_weights_use_nothing_of_before"),
    (TakesAHitForWhole, "test_a_prompt_that_goes_on_otherwise_shares_its_beginning_only"),
    (_NotChained, "test_a_prompt_that_goes_on_otherwise_shares_its_beginning_only"),
    (PaysForNobody, "test_a_tenant_pays_for_what_it_stores_and_all_load_it"),
    (NeedsADaemon, "test_without_a_daemon_it_computes_and_caches_when_one_comes"),
    (StoresNothing, "test_what_one_engine_computed_another_loads"),
    (ClearsNothing, "test_a_clear_forgets"),
]


@pytest.mark.parametrize(("kind", "name"), WRONG)
def test_negative_control_a_wrong_connector_is_caught(
    kind: type[Engine] | type[Toy],
    name: str,
    daemon: Daemon,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each fails the test named, on a daemon that the others use too."""
    made: list[EngineUnderTest] = []

    def engines(daemon: Daemon, socket: str = "", **setup: str) -> EngineUnderTest:
        wrong = kind if issubclass(kind, Toy) else type("Wrong", (Toy,), {"kind": kind})
        made.append(wrong(socket or daemon.socket, **{"weights": "1", **setup}))
        if not socket:
            made[-1].wait_connected()
        return made[-1]

    if kind is _NotChained:
        monkeypatch.setattr("examples.toy_engine.keys_of", keys_of_single_pages)
    right = Toy(f"{daemon.socket}.nobody", "1")
    made.append(right)
    test = getattr(ConnectorSuite(), name)
    try:
        with pytest.raises((AssertionError, TypeError)):
            test(daemon, engines, lambda prompt: right.run(prompt).output)
    finally:
        for engine in made:
            engine.close()
        if not daemon.running:
            daemon.start()
