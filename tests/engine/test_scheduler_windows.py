"""Sparse windows (decision 056): vLLM's real scheduler, a real daemon, pages of known content. What
hits is compared with what ``kvass simulate`` says of the same prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvass.connectors.vllm import configuration
from kvass.connectors.vllm.configuration import VllmSetup
from kvass.engine.planner import Planner
from kvass.testing.daemon import Daemon
from tests.engine import conftest
from tests.engine.branching import branches, simulated
from tests.engine.conftest import empty
from tests.engine.test_scheduler_groups import DEEPSEEK_V4, GEMMA, GPT_OSS, finish, prompt
from tests.engine.test_scheduler_load_limit import explained
from tests.support.vllm.hybrid import GroupShape, make_hybrid_configs
from tests.support.vllm.ranks import StubModelEngine, making

CHUNK = 64
NEVER = {"kvass.window_interval": 1 << 20}
"""Windows only where hits are likely to end."""
each_model = pytest.mark.parametrize(
    "shapes", [GPT_OSS, GEMMA, DEEPSEEK_V4], ids=["gpt-oss", "gemma", "deepseek-v4"]
)

daemon = conftest.own_daemon


@pytest.fixture
def engine(daemon: Daemon, pages: Iterator[dict[str, Any]]) -> Iterator[Any]:
    def make(shapes: Sequence[GroupShape], **options: Any) -> StubModelEngine:
        options = {"blocks": 400, "batched": 128, "chunk": CHUNK, **next(pages), **options}
        return StubModelEngine(daemon.socket, daemon, shapes=shapes, **options)

    with making(make) as engine:
        yield engine


def hit(engine: StubModelEngine, name: str, tokens: Sequence[int], max_tokens: int = 1) -> int:
    """How many tokens the engine, which has nothing of its own, begins with. What it computes is
    stored, and all that it reads is verified."""
    assert engine.world.scheduler.kv_cache_manager.reset_prefix_cache()
    _, found = engine.load(name, tokens, max_tokens=max_tokens)
    finish(engine)
    assert engine.daemon is not None
    engine.daemon.wait_until(reservations=0)
    return int(found)


@each_model
@pytest.mark.parametrize("interval", [0, 256])
def test_prompts_that_part_anywhere_hit_as_simulated_and_right(
    daemon: Daemon, engine: Any, shapes: list[GroupShape], interval: int
) -> None:
    one = engine(shapes, more={"kvass.window_interval": interval})
    prompts = branches(3, 32, 900, CHUNK)
    hits = [hit(one, f"r{number}", tokens) for number, tokens in enumerate(prompts)]
    groups = one.world.connector._planner._setup.groups
    assert hits == simulated(groups, CHUNK, prompts, interval)
    assert sum(found > 0 for found in hits) > 16
    empty(daemon)


@each_model
@pytest.mark.parametrize("told", [True, False], ids=["told", "negative control"])
def test_a_shared_prefix_costs_one_recomputation(
    daemon: Daemon,
    engine: Any,
    shapes: list[GroupShape],
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second prompt computes it and stores the windows at its end; the third hits."""
    if not told:
        answered = Planner._answered
        monkeypatch.setattr(
            Planner,
            "_answered",
            lambda self, state, question, found, most: answered(
                self, state, question, found._replace(whole=0), most
            ),
        )
    one = engine(shapes, more=NEVER)
    shared = prompt(1, 5 * CHUNK + 10)
    hits = [hit(one, f"r{n}", shared + prompt(n, 200)) for n in range(10, 13)]
    assert hits == [0, 0, 5 * CHUNK if told else 0]
    first, second, third = explained(daemon)
    assert (first["why"], second["why"]) == ("absent", "no_window_here")
    assert second["detail"] == f"{5 * CHUNK}"
    assert third["why"] == ("absent" if told else "no_window_here")


@each_model
def test_the_next_turn_hits_where_the_answer_ended(engine: Any, shapes: list[GroupShape]) -> None:
    a, b = engine(shapes, more=NEVER), engine(shapes, more=NEVER)
    said = a.generate("turn 1", prompt(2, 150), max_tokens=200)
    turns = list(said.all_token_ids)
    assert hit(b, "turn 2", turns + prompt(3, 70)) == (len(turns) - 1) // CHUNK * CHUNK
    assert hit(b, "the same", prompt(2, 150)) == 128


def test_with_a_drafter_a_hit_leaves_a_chunk_spare(engine: Any) -> None:
    """A prompt again, and one that parts: the windows are where such hits end."""
    one = engine(GPT_OSS, more=NEVER, drafts=2, drafter="eagle")
    shared = prompt(1, 5 * CHUNK + 10)
    assert [hit(one, f"same {n}", shared) for n in range(2)] == [0, 4 * CHUNK]
    hits = [hit(one, f"r{n}", shared[: 4 * CHUNK + 9] + prompt(n, 200)) for n in range(10, 13)]
    assert hits == [0, 3 * CHUNK, 3 * CHUNK]


@pytest.mark.parametrize("shapes", [GPT_OSS, DEEPSEEK_V4], ids=["gpt-oss", "deepseek-v4"])
def test_where_the_engines_own_hit_ended_windows_are_stored(
    engine: Any, shapes: list[GroupShape]
) -> None:
    """vLLM has the beginning itself, so the daemon is asked for the rest only. Of a window that
    begins inside a chunk, vLLM lacks the first blocks of that chunk."""
    a, b = engine(shapes, more=NEVER), engine(shapes, more=NEVER)
    shared = prompt(4, 4 * CHUNK)
    a.generate("whole", shared + prompt(5, 100), max_tokens=1)
    a.generate("parts", shared + prompt(6, 100), max_tokens=1)
    own = a.found["parts"]
    assert own == 4 * CHUNK
    assert hit(b, "again", shared + prompt(7, 100)) == own


def test_windows_take_the_room_of_the_points_alone(daemon: Daemon, engine: Any) -> None:
    """6 whole chunks: with an interval of 2 at 2, 4 and 6, and at the prompt's end."""
    sizes = {}
    for interval in (0, 2 * CHUNK, 1 << 20):
        a = engine(GPT_OSS, more={"kvass.window_interval": interval}, tag=f"{interval}")
        a.generate("a", prompt(9, 385))
        window, full = daemon.status()["namespaces"][-1]["groups"]
        assert full["rows"] == 6
        sizes[interval] = window["rows"]
    assert list(sizes.values()) == [6, 3, 1]


@pytest.mark.parametrize(
    ("option", "own", "chosen"),
    [
        (None, 0, 4096),
        (None, 2048, 2048),
        (None, None, 0),
        ("dense", 2048, 0),
        (0, 2048, 0),
        (8192, 2048, 8192),
    ],
)
def test_the_interval_is_the_options_else_vllms_else_the_default(
    option: object, own: int | None, chosen: int
) -> None:
    more = {} if option is None else {"kvass.window_interval": option}
    config, caches = make_hybrid_configs({"kvass.chunk_tokens": CHUNK, **more}, GPT_OSS)
    config.cache_config.prefix_cache_retention_interval = own
    setup = configuration.read_setup(config, caches)
    assert isinstance(setup, VllmSetup)
    assert setup.window_interval == chosen
