"""Real engines over two nodes: two process trees each, and a daemon for each node.

What the ranks of both nodes load together is compared with what an engine of one rank without kvass
says: in float32 the sums of two ranks are those of one, to ``SAME``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import pytest

from kvass.simulate.player import Model, Player, Setting
from kvass.simulate.traces import Trace, TraceRequest
from kvass.testing.daemon import Daemon
from kvass.types import GroupLayout
from tests.engine.conftest import ARGS, BLOCK, NOTHING_OWED, ROOT
from tests.engine.hybrid import GEMMA3, QWEN3_NEXT, assert_telling
from tests.engine.hybrid import Model as Hybrid
from tests.support.soak.kills import HELD, Kills, right_answers
from tests.support.soak.kills import prompts as short_prompts
from tests.support.vllm.judge import Judge, apart
from tests.support.vllm.models import TINY, TINY_LATENT, build
from tests.support.vllm.nodes import NodesEngine, running_daemons
from tests.support.vllm.process import Answer, EngineProcess, Prompt, Settings

pytestmark = pytest.mark.engine

Make = Callable[[int], list[int]]

CHUNK: Final = 64
OPTIONS: Final[dict[str, Any]] = {"kvass.chunk_tokens": CHUNK, "kvass.skip_slow_loads": False}
PATIENT: Final[dict[str, Any]] = {"lookup_budget_ms": 10_000}
LARGE: Final = ["128MiB"] * 2
SMALL: Final = ["3MiB", "1MiB"]
LATENT_BLOCK: Final = 16
MLA: Final[dict[str, Any]] = {"block_size": LATENT_BLOCK, "attention_backend": "CPU_MLA"}
TOKENS: Final = 4


@dataclass
class Nodes:
    """Engines ``a`` and ``b`` over the same two daemons."""

    daemons: list[Daemon]
    engines: list[NodesEngine]

    @property
    def a(self) -> NodesEngine:
        return self.engines[0]

    @property
    def b(self) -> NodesEngine:
        return self.engines[1]

    def restart(self, l1_sizes: Sequence[str]) -> None:
        """New daemons with these sizes of L1, which all engines use again."""
        for daemon, size in zip(self.daemons, l1_sizes, strict=True):
            daemon._options["l1_size"] = size
            daemon.restart()
        for engine in self.engines:
            wait_for_hits(engine)
        self.rest()

    def rest(self) -> list[dict[str, Any]]:
        """Wait until nothing is owed by anybody; the daemons' status then."""
        return [daemon.wait_until(**NOTHING_OWED) for daemon in self.daemons]


def wait_for_hits(engine: NodesEngine) -> None:
    """Until a prompt that it stored is found, and so all its ranks are connected."""
    rng = Random(0)
    for _ in range(100):
        tokens = rng.choices(range(4, TINY.vocab), k=2 * CHUNK + 1)  # a drafter needs two chunks
        engine.one(tokens, 1)
        assert engine.reset()
        if engine.one(tokens, 1).external:
            return
    raise AssertionError(f"no hit: {engine.log()[-3000:]}")


@pytest.fixture(scope="module")
def nodes(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    folder, engines = tmp_path_factory.mktemp("nodes"), list[NodesEngine]()
    with running_daemons(folder, LARGE, **PATIENT) as daemons:
        sockets = [Path(daemon.socket) for daemon in daemons]
        try:
            for name in "ab":
                log = folder / f"{name}.log"
                engine = NodesEngine(model, log, sockets, args=ARGS, options=OPTIONS, patient=True)
                engines.append(engine)
            for engine in engines:
                engine.wait_ready()
                wait_for_hits(engine)
            yield Nodes(daemons, engines)
        finally:
            for engine in engines:
                engine.kill()


def drawn(seed: int, count: int, most: int = 700) -> list[list[int]]:
    """Prompts of random lengths, most of which begin as others do."""
    rng, made = Random(seed), list[list[int]]()
    stems = [rng.choices(range(4, TINY.vocab), k=rng.randint(CHUNK, most)) for _ in range(4)]
    for _ in range(count):
        stem = rng.choice(stems)
        rest = rng.choices(range(4, TINY.vocab), k=rng.randint(20, 200))
        made.append([*stem[: rng.randint(0, len(stem))], *rest])
    return made


def check(judge: Judge, tokens: list[int], answer: Answer) -> None:
    """Assert that it is as near to an answer without cache as vLLM is to itself."""
    right = judge.cold(tokens, len(answer.tokens))
    assert answer.finish_reason == "length"
    assert apart(answer, right) <= judge.noise(), f"{answer.external} loaded: {answer}, not {right}"


def hit_of(tokens: Sequence[int], block: int = BLOCK) -> int:
    """The longest hit of a prompt that was stored whole."""
    return (len(tokens) - 1) // block * block


# ---------------------------------------------------------------- dense


@pytest.mark.parametrize("count", [8, pytest.param(32, marks=pytest.mark.slow)])
def test_a_second_engine_finds_what_the_first_stored(
    nodes: Nodes, judge: Judge, count: int
) -> None:
    asked = drawn(count, count)
    for tokens, answer in zip(
        asked, nodes.a.store(*(Prompt(tokens, TOKENS) for tokens in asked)), strict=True
    ):
        check(judge, tokens, answer)
    for tokens in asked:
        assert nodes.b.reset()
        warm = nodes.b.one(tokens, TOKENS)
        assert (warm.local, warm.external) == (0, hit_of(tokens))
        check(judge, tokens, warm)
    assert all(status["rows"] for status in nodes.rest())
    for engine in nodes.engines:
        assert not re.search("(step|report).* lost", engine.log())


@pytest.mark.parametrize("rank", [0, 1])
def test_what_the_rank_of_each_node_loads_decides(
    nodes: Nodes, judge: Judge, prompt: Make, rank: int
) -> None:
    """The negative control."""
    tokens = prompt(300)
    nodes.a.store(Prompt(tokens, 1))
    assert nodes.b.reset()
    nodes.b.verify_again()  # what is not verified yet is not loaded inside a step
    nodes.b.disturb(Settings(spoil=True), rank=rank)
    wrong = nodes.b.one(tokens)
    nodes.b.disturb(Settings(), rank=rank)
    assert wrong.external == hit_of(tokens)
    assert apart(wrong, judge.cold(tokens)) > judge.noise()
    assert nodes.b.reset()


def test_a_hit_takes_at_most_one_step_more_than_on_one_node(
    nodes: Nodes, a: EngineProcess, prompt: Make
) -> None:
    """Counted with loads inside steps, which end in the step in which they begin. The least of some
    hits: a busy machine may answer later."""

    def steps(engine: EngineProcess) -> int:
        tokens = prompt(300)
        engine.store(Prompt(tokens, 1))
        assert engine.reset()
        engine.load_in_steps(at_most=0)
        answer = engine.one(tokens)
        engine.load_in_steps(False)
        assert answer.external == hit_of(tokens)
        assert engine.reset()
        return answer.first_token_steps

    most = steps(a) + 1
    assert any(steps(nodes.a) <= most for _ in range(5))


# ---------------------------------------------------------------- one daemon is smaller


def predicted(asked: Sequence[list[int]], l1_size: str) -> list[int]:
    """The hits of each prompt in a daemon that gets them one after the other (``kvass simulate``):
    one rank of two with half of the heads."""
    page = 2 * (TINY.kv_heads // 2) * TINY.head_dim * 4 * BLOCK
    names = tuple(map(str, range(TINY.layers)))
    layout = GroupLayout("full", BLOCK, names, (page,) * TINY.layers)
    ids, requests = dict[tuple[int, ...], int](), []
    for name, tokens in enumerate(asked):
        ends = range(BLOCK, len(tokens) + 1, BLOCK)
        pieces = [ids.setdefault(tuple(tokens[:end]), len(ids) + 1) for end in ends]
        requests.append(TraceRequest(name, len(tokens), 1, np.array(pieces, np.uint64), name=name))
    setting = Setting(int(l1_size.removesuffix("MiB")) << 20, CHUNK, tails=True)
    player = Player(setting, {0: Model(CHUNK, (layout,))})
    *_, outcome = player.play(Trace("asked", BLOCK, requests))
    return outcome.hits


@pytest.mark.parametrize("sizes", [SMALL, pytest.param(SMALL[::-1], marks=pytest.mark.slow)])
def test_a_hit_is_what_the_smaller_daemon_has(nodes: Nodes, judge: Judge, sizes: list[str]) -> None:
    nodes.restart(sizes)
    assert nodes.a.reset(connector=True)
    nodes.a.one([5] * 8, 1)  # the other node is told in a step
    for daemon in nodes.daemons:
        daemon.wait_until(rows=0)
    asked, hits = drawn(2, 14), list[int]()
    for tokens in asked:
        assert nodes.a.reset()
        answer = nodes.a.one(tokens, 1)
        nodes.rest()
        assert answer.local == 0
        check(judge, tokens, answer)
        hits.append(answer.external)
    one, other = (predicted(asked, size) for size in sizes)
    assert one != other
    assert hits == [min(both) for both in zip(one, other, strict=True)]
    nodes.restart(LARGE)


# ---------------------------------------------------------------- daemons are killed


def kill(nodes: Nodes, judge: Judge, times: int, seed: int) -> None:
    known = right_answers(judge, short_prompts(seed, 8))
    kills = Kills(nodes.engines, nodes.daemons, known, judge.noise(), seed)
    report = kills.run(times)
    assert report.failures == []
    assert report.hits
    for status in nodes.rest():
        assert {name: status[name] for name in HELD} == dict.fromkeys(HELD, 0)


def test_a_daemon_that_is_killed_costs_hits_and_nothing_else(nodes: Nodes, judge: Judge) -> None:
    kill(nodes, judge, 3, seed=1)


def test_the_kills_notice_a_wrong_answer(nodes: Nodes, prompt: Make) -> None:
    kills = Kills(nodes.engines, nodes.daemons, [], 0.01, seed=3)
    right, other = nodes.a.one(prompt(100)), nodes.a.one(prompt(100))
    kills._compare(right, right, "right")
    assert kills.report.failures == []
    kills._compare(other, right, "wrong")
    assert len(kills.report.failures) == 1


@pytest.mark.slow
def test_a_hundred_daemons_are_killed(nodes: Nodes, judge: Judge) -> None:
    kill(nodes, judge, 100, seed=2)


# ---------------------------------------------------------------- other models


@pytest.mark.slow
def test_latents_are_stored_once_on_each_node(tmp_path: Path, prompt: Make) -> None:
    """On a CPU vLLM's MLA contradicts itself on a re-prefill, so pages are compared."""
    path = build(ROOT / ".cache" / "models", TINY_LATENT)
    with running_daemons(tmp_path, LARGE, **PATIENT) as daemons:
        sockets = [Path(daemon.socket) for daemon in daemons]
        engine = NodesEngine(path, tmp_path / "a.log", sockets, args={**ARGS, **MLA}, patient=True)
        with engine.wait_ready():
            for _ in range(20):  # a busy machine left out the store
                assert engine.reset()
                engine.reset_hooks()
                engine.disturb(Settings(watch=True))
                tokens = prompt(520)
                engine.one(tokens, 1)
                stored = engine.pages()
                assert engine.reset()
                engine.reset_hooks()
                engine.disturb(Settings(watch=True))
                engine.scrub()
                if engine.one(tokens, 1).external == 512:
                    break
            first = stored[0].stored
            assert len(first) == len(set(first)) == 512 // LATENT_BLOCK
            assert [pages.stored for pages in stored] == [first] * 2
            assert [pages.loaded for pages in engine.pages()] == [first] * 2
            latents = TINY_LATENT.layers * (TINY_LATENT.latent + TINY_LATENT.rope) * 4
            for daemon in daemons:
                status = daemon.wait_until(**NOTHING_OWED)
                assert status["l1_used_bytes"] >= 512 * latents
                assert status["l1_used_bytes"] % (512 * latents) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", [GEMMA3, QWEN3_NEXT], ids=lambda kind: kind.blueprint.name)
def test_windows_and_states(kind: Hybrid, tmp_path: Path) -> None:
    """What ``b`` finds, it answers as after a hit of its own under another salt."""
    path, engines = build(ROOT / ".cache" / "models", kind.blueprint), list[NodesEngine]()
    rng = Random(1)
    with running_daemons(tmp_path, LARGE, **PATIENT) as daemons:
        sockets = [Path(daemon.socket) for daemon in daemons]
        try:
            for name in "ab":
                args, log = {**ARGS, **kind.args}, tmp_path / f"{name}.log"
                engines.append(NodesEngine(path, log, sockets, args=args, patient=True))
            a, b = (engine.wait_ready() for engine in engines)
            judge = Judge(b, beyond=1)
            for size in kind.sizes:
                tokens = [rng.randrange(4, 1000) for _ in range(size)]
                assert a.reset()
                a.store(Prompt(tokens, 1))
                assert b.reset()
                warm = b.one(tokens, 6)
                assert (warm.local, warm.external) == (0, kind.hit(size)), size
                assert_telling(judge.cold(tokens, 6))
                judge.check(tokens, warm, alike=False, stored=warm.cached + 1)
        finally:
            for engine in engines:
                engine.kill()


@pytest.mark.slow
def test_a_node_with_other_weights_turns_the_engine_uncached(
    model: Path, tmp_path: Path, prompt: Make
) -> None:
    other = build(ROOT / ".cache" / "models", seed=1)
    with running_daemons(tmp_path, LARGE, **PATIENT) as daemons:
        sockets = [Path(daemon.socket) for daemon in daemons]
        log = tmp_path / "a.log"
        with NodesEngine(model, log, sockets, args=ARGS, others=[other], patient=True) as engine:
            tokens = prompt(600)
            for _ in range(5):
                assert engine.one(tokens).external == 0
                assert engine.reset()
            said = [line for line in engine.log().splitlines() if "uncached" in line]
            assert len(said) == 1, said
            assert "weights" in said[0]
