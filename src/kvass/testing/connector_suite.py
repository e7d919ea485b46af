"""Tests that every connector must pass. The author of a connector subclasses them.

::

    class TestMyConnector(ConnectorSuite):
        @pytest.fixture
        def make_engine(self):
            return MyEngine

``MyEngine`` is a subclass of ``EngineUnderTest`` that runs an engine with the connector. The suite
starts daemons of its own: one for all tests but that of tiers. It needs pytest, and looks at
answers and at ``kvass status`` alone. If starting an engine is slow, ``make_engine`` may return one
again that the suite has closed, for the same socket and setup.

A wrong page must change the engine's answer, or the suite cannot see it. Use a model with random
weights and compare all that it computes, such as logits.
"""

from __future__ import annotations

import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import pytest

from kvass.testing.daemon import Daemon, running_daemon


class RunResult(NamedTuple):
    """What an engine answered. ``output``: all that it computed, comparable with ``==``.
    ``loaded``: how many tokens of the prompt it took from kvass."""

    output: Any
    loaded: int


class EngineUnderTest(ABC):
    """An engine with the connector under test, made by ``MyEngine(socket, **setup)``.

    ``setup``: ``weights``, a text, of which each stands for other weights; ``layout``, a text, of
    which each stands for another layout of the pages of equal weights; ``tenant``, who pays. A
    connector without layouts or tenants ignores them and says so in the suite's class.
    """

    chunk_tokens: ClassVar[int] = 16
    """Prompts share multiples of this many tokens. The ids of their tokens are below 1,000."""

    @abstractmethod
    def run(self, prompt: list[int]) -> RunResult:
        """Run a prompt, and store its KV. On return all stores have ended."""

    @abstractmethod
    def close(self) -> None:
        """End the engine."""

    @abstractmethod
    def wait_connected(self) -> None:
        """Wait until the connector has registered with the daemon, which runs."""

    def abort(self, prompt: list[int]) -> None:
        """Begin a prompt, and abort it before its answer is complete."""
        pytest.skip("this engine aborts nothing")

    def clear(self) -> None:
        """Forget cached KV, as the engine's own reset does."""
        pytest.skip("this engine clears nothing")

    def replace_weights(self, weights: str) -> None:
        """Replace the weights in place."""
        pytest.skip("this engine's weights are never replaced")


MakeEngine = Callable[..., EngineUnderTest]
CHUNKS: Final = 4
TENANTS: Final = ("one", "two")
OLDER: Final = (
    "-c",
    "from kvass import messages; messages.FEATURES = (); from kvass.cli.main import main; main()",
)
"""The arguments of Python that run a kvass without optional features."""
_numbers = itertools.count()


class ConnectorSuite:
    """The tests that every connector must pass; see the top of this file."""

    has_layouts: ClassVar[bool] = True
    has_tenants: ClassVar[bool] = True
    bound_s: ClassVar[float] = 20.0
    """A prompt that takes longer than this has waited for a daemon that does not answer."""
    patience_s: ClassVar[float] = 30.0
    """How long a connector may take to notice that a daemon is there again."""
    daemon_options: ClassVar[dict[str, Any]] = {"l1_size": "64MiB", "lookup_budget_ms": 500}
    """Options of the suite's daemons."""

    @pytest.fixture(scope="class")
    def daemon(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
        """The daemon of all tests but that of tiers."""
        options = {**self.daemon_options, "quota": [f"{tenant}=16MiB" for tenant in TENANTS]}
        with running_daemon(tmp_path_factory.mktemp("daemon"), **options) as one:
            yield one

    @pytest.fixture
    def engines(self, make_engine: MakeEngine) -> Iterator[MakeEngine]:
        """``make_engine``, whose engines are closed after the test."""
        with ExitStack() as ending:

            def make(daemon: Daemon, **setup: str) -> EngineUnderTest:
                engine = make_engine(daemon.socket, **{"weights": "1", **setup})
                ending.callback(engine.close)
                engine.wait_connected()
                return engine

            yield make

    @pytest.fixture
    def uncached(
        self, make_engine: MakeEngine, tmp_path: Path
    ) -> Iterator[Callable[[list[int]], Any]]:
        """What engines of weights ``1`` answer without a daemon."""
        engine = make_engine(str(tmp_path / "nobody"), weights="1")
        yield lambda prompt: engine.run(prompt).output
        engine.close()

    # ------------------------------------------------------------ helpers

    def prompt(self, engine: EngineUnderTest, rest: int = 3) -> list[int]:
        """A new prompt of ``CHUNKS`` chunks and ``rest`` tokens."""
        first = 37 * next(_numbers)
        return [(first + 7 * i * i) % 997 for i in range(CHUNKS * engine.chunk_tokens + rest)]

    def run(self, engine: EngineUnderTest, prompt: list[int]) -> RunResult:
        """Run in another thread, so that an engine that hangs fails the test."""
        ended: Future[RunResult] = Future()

        def one() -> None:
            try:
                ended.set_result(engine.run(prompt))
            except Exception as error:  # noqa: BLE001 - the test fails with whatever it is
                ended.set_exception(error)

        threading.Thread(target=one, daemon=True).start()
        return ended.result(timeout=self.bound_s)

    def eventually_loads(self, engine: EngineUnderTest, prompt: list[int], right: Any) -> None:
        """Run until the engine loads; every answer must be ``right``."""
        deadline_s = time.monotonic() + self.patience_s
        while not (answer := self.run(engine, prompt)).loaded:
            assert answer.output == right
            assert time.monotonic() < deadline_s, "it never loads"
            time.sleep(0.02)
        assert answer.output == right

    def idle(self, daemon: Daemon) -> None:
        """Nothing is held."""
        daemon.wait_until(self.patience_s, leases=0, reservations=0, pins=0)

    # ------------------------------------------------------------ hits

    def test_what_one_engine_computed_another_loads(
        self, daemon: Daemon, engines: MakeEngine, uncached: Callable[[list[int]], Any]
    ) -> None:
        a, b = engines(daemon), engines(daemon)
        prompt = self.prompt(a)
        right = uncached(prompt)
        assert self.run(a, prompt) == (right, 0)
        answer = self.run(b, prompt)
        assert answer.output == right
        whole = CHUNKS * a.chunk_tokens
        assert whole - a.chunk_tokens <= answer.loaded < len(prompt)
        self.idle(daemon)

    def test_a_prompt_that_goes_on_otherwise_shares_its_beginning_only(
        self, daemon: Daemon, engines: MakeEngine, uncached: Callable[[list[int]], Any]
    ) -> None:
        a, b = engines(daemon), engines(daemon)
        prompt, half = self.prompt(a), CHUNKS // 2 * a.chunk_tokens
        self.run(a, prompt)
        other = [*prompt[:half], prompt[half] + 1, *prompt[half + 1 :]]
        answer = self.run(b, other)
        assert 0 < answer.loaded <= half
        assert answer.output == uncached(other)
        turned = prompt[half:] + prompt[:half]
        assert self.run(b, turned) == (uncached(turned), 0), "the same tokens after other ones"

    def test_a_prompt_of_whole_chunks_and_short_ones_are_right(
        self, daemon: Daemon, engines: MakeEngine, uncached: Callable[[list[int]], Any]
    ) -> None:
        engine = engines(daemon)
        for rest in (0, 1, -1):
            prompt = self.prompt(engine, rest)
            right = uncached(prompt)
            assert self.run(engine, prompt).output == right
            assert self.run(engine, prompt).output == right
        assert self.run(engine, prompt[:2]).output == uncached(prompt[:2])

    # ------------------------------------------------------------ what must not be shared

    def test_other_weights_share_nothing(self, daemon: Daemon, engines: MakeEngine) -> None:
        a, b = engines(daemon), engines(daemon, weights="2")
        prompt = self.prompt(a)
        first = self.run(a, prompt)
        other = self.run(b, prompt)
        assert other.loaded == 0
        assert other.output != first.output, "the weights are the same: the test shows nothing"

    def test_another_layout_shares_nothing(
        self, daemon: Daemon, engines: MakeEngine, uncached: Callable[[list[int]], Any]
    ) -> None:
        if not self.has_layouts:
            pytest.skip("this engine has one layout")
        a, b = engines(daemon), engines(daemon, layout="other")
        prompt = self.prompt(a)
        self.run(a, prompt)
        answer = self.run(b, prompt)
        assert answer == (uncached(prompt), 0)

    def test_replaced_weights_use_nothing_of_before(
        self, daemon: Daemon, engines: MakeEngine, uncached: Callable[[list[int]], Any]
    ) -> None:
        a, b, new = engines(daemon), engines(daemon), engines(daemon, weights="2")
        prompt = self.prompt(a)
        self.run(a, prompt)
        a.replace_weights("2")
        answer = self.run(a, prompt)
        assert answer.loaded == 0
        assert answer.output == self.run(new, prompt).output
        kept = self.run(b, prompt)
        assert kept.output == uncached(prompt), "it loaded what the new weights computed"

    # ------------------------------------------------------------ ends

    def test_a_clear_forgets(
        self, daemon: Daemon, engines: MakeEngine, uncached: Callable[[list[int]], Any]
    ) -> None:
        a, b = engines(daemon), engines(daemon)
        prompt = self.prompt(a)
        self.run(a, prompt)
        a.clear()
        assert self.run(b, prompt) == (uncached(prompt), 0)
        self.eventually_loads(a, prompt, uncached(prompt))

    def test_an_aborted_prompt_leaves_nothing_held_and_nothing_wrong(
        self, daemon: Daemon, engines: MakeEngine, uncached: Callable[[list[int]], Any]
    ) -> None:
        engine = engines(daemon)
        prompt = self.prompt(engine)
        right = uncached(prompt)
        engine.abort(prompt)
        assert self.run(engine, prompt).output == right
        engine.abort(prompt)  # now with a hit
        assert self.run(engine, prompt).output == right
        self.idle(daemon)

    def test_an_engine_that_ends_leaves_nothing_held(
        self, daemon: Daemon, make_engine: MakeEngine
    ) -> None:
        for _ in range(3):
            engine = make_engine(daemon.socket, weights="1")
            engine.wait_connected()
            self.run(engine, self.prompt(engine))
            engine.close()
        daemon.wait_until(self.patience_s, leases=0, reservations=0, pins=0, sessions=1)

    # ------------------------------------------------------------ trouble

    def test_without_a_daemon_it_computes_and_caches_when_one_comes(
        self, daemon: Daemon, engines: MakeEngine, uncached: Callable[[list[int]], Any]
    ) -> None:
        engine = engines(daemon)
        prompt = self.prompt(engine)
        right = uncached(prompt)
        self.run(engine, prompt)
        daemon.kill()
        assert self.run(engine, prompt) == (right, 0)
        daemon.start()
        self.eventually_loads(engine, prompt, right)
        self.idle(daemon)

    def test_a_daemon_that_hangs_delays_no_prompt_without_a_bound(
        self, daemon: Daemon, engines: MakeEngine, uncached: Callable[[list[int]], Any]
    ) -> None:
        engine = engines(daemon)
        prompt, other = self.prompt(engine), self.prompt(engine)
        right = uncached(prompt)
        self.run(engine, prompt)
        daemon.suspend()
        try:
            assert self.run(engine, prompt) == (right, 0)
            assert self.run(engine, other).output == uncached(other)
        finally:
            daemon.resume()
        self.eventually_loads(engine, prompt, right)
        self.idle(daemon)

    def test_the_daemon_may_die_or_hang_at_any_time(
        self, daemon: Daemon, engines: MakeEngine, uncached: Callable[[list[int]], Any]
    ) -> None:
        a, b = engines(daemon), engines(daemon)
        prompts = [self.prompt(a) for _ in range(6)]
        rights = [uncached(prompt) for prompt in prompts]
        stop = threading.Event()

        def work(engine: EngineUnderTest) -> int:
            runs = 0
            while not stop.is_set():
                for prompt, right in zip(prompts, rights, strict=True):
                    assert self.run(engine, prompt).output == right
                    runs += 1
            return runs

        with ThreadPoolExecutor(2) as pool:
            working = [pool.submit(work, engine) for engine in (a, b)]
            try:
                for _ in range(2):
                    time.sleep(0.1)
                    daemon.restart()
                    time.sleep(0.1)
                    daemon.suspend()
                    time.sleep(0.05)
                    daemon.resume()
            finally:
                stop.set()
            assert all(each.result() for each in working)
        self.idle(daemon)

    def test_a_daemon_without_optional_features_serves(
        self, tmp_path: Path, engines: MakeEngine, uncached: Callable[[list[int]], Any]
    ) -> None:
        """An older daemon of this protocol names fewer features than the connector knows."""
        with running_daemon(tmp_path, program=OLDER, **self.daemon_options) as daemon:
            a, b = engines(daemon), engines(daemon)
            prompt = self.prompt(a)
            right = uncached(prompt)
            assert self.run(a, prompt) == (right, 0)
            self.eventually_loads(b, prompt, right)

    # ------------------------------------------------------------ tiers and tenants

    def test_what_a_tier_has_is_loaded_after_a_restart(
        self, tmp_path: Path, engines: MakeEngine, uncached: Callable[[list[int]], Any]
    ) -> None:
        (disk := tmp_path / "disk").mkdir()
        options = {**self.daemon_options, "tier": [f"disk:{disk}?capacity=1GiB"]}
        with running_daemon(tmp_path, **options) as daemon:
            engine = engines(daemon)
            prompt = self.prompt(engine)
            right = self.run(engine, prompt).output
            assert daemon.stop() == 0, "it stores what is queued for the tier before it ends"
            daemon.start()
            self.eventually_loads(engines(daemon), prompt, right)
            assert right == uncached(prompt)

    def test_a_tenant_pays_for_what_it_stores_and_all_load_it(
        self, daemon: Daemon, engines: MakeEngine, uncached: Callable[[list[int]], Any]
    ) -> None:
        if not self.has_tenants:
            pytest.skip("this engine has no tenants")
        a, b = [engines(daemon, tenant=tenant) for tenant in TENANTS]
        prompt = self.prompt(a)
        right = uncached(prompt)
        assert self.run(a, prompt).output == right
        used = {each["tenant"]: each["l1_bytes"] for each in daemon.status()["tenants"]}
        assert used["one"] > 0
        assert used["two"] == 0
        self.eventually_loads(b, prompt, right)
