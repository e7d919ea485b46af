"""EAGLE and MTP: a hit is as long as the one that vLLM would have found itself.

vLLM's real scheduler, a real daemon, pages of known content; the drafter proposes nothing. What a
local hit would be is asked of vLLM's own KV cache manager, in the engine that computed the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

import pytest

from kvass.connectors.vllm import configuration
from kvass.testing.daemon import Daemon
from tests.engine import conftest
from tests.engine.conftest import GPU
from tests.engine.test_scheduler_groups import DEEPSEEK_V4, DENSE, GPT_OSS, QWEN_NEXT, prompt
from tests.support.vllm.hybrid import GroupShape, make_hybrid_configs
from tests.support.vllm.ranks import StubModelEngine, making, until
from tests.support.vllm.scheduler import before, read_setup

FULL: list[GroupShape] = [("full", 16, 0, 2)]
WINDOWS: list[GroupShape] = [("sliding_window", 16, 40, 1), ("sliding_window", 16, 70, 1)]
MODELS = {
    "llama": (FULL, 16),
    "gpt-oss": (GPT_OSS, 16),
    "windows": (WINDOWS, 16),
    "qwen-next": (QWEN_NEXT, 64),
    "deepseek-v4": (DEEPSEEK_V4, 64),
}
"""Groups, and the tokens to which vLLM aligns its own hits: here those of a chunk as well."""
"""vLLM's own cache has each place at which these prompts part."""
each_model = pytest.mark.parametrize(("shapes", "chunk"), MODELS.values(), ids=MODELS)

daemon = conftest.own_daemon


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Any]:
    """Makes engines; the pages of every other one are on a fake GPU."""
    places = cycle([GPU, {}])

    def make(shapes: Sequence[GroupShape], chunk: int, **options: Any) -> StubModelEngine:
        options = {"blocks": 400, "batched": 128, "drafts": 2, "drafter": "eagle", **options}
        options |= {"shapes": shapes, "chunk": chunk, "more": DENSE, **next(places)}
        return StubModelEngine(daemon.socket, daemon, **options)

    with making(make) as engine:
        yield engine


def pair(
    engine: Any, shapes: list[GroupShape], chunk: int
) -> tuple[StubModelEngine, StubModelEngine]:
    """One that has computed and stored ``prompt(1, 400)``, and one that only reads."""
    a, b = engine(shapes, chunk), engine(shapes, chunk, kv_role="kv_consumer")
    a.generate("a", prompt(1, 400))
    return a, b


def local_hit(engine: StubModelEngine, tokens: list[int]) -> int:
    """What vLLM finds of ``tokens`` in its own cache."""
    probe = engine.world.add("probe", tokens)
    _, found, _ = engine.world.scheduler.kv_cache_manager.get_computed_blocks(probe)
    engine.world.abort("probe")
    return int(found)


def external_hit(engine: StubModelEngine, tokens: list[int]) -> int:
    """What an engine that has nothing itself loads of ``tokens``; every page of it is verified."""
    assert engine.world.scheduler.kv_cache_manager.reset_prefix_cache()
    _, found = engine.load("b", tokens)
    until(lambda: engine.step() and not engine.world.scheduler.has_requests(), "the end")
    return int(found)


def cases(chunk: int) -> list[list[int]]:
    """Prompts that begin as the stored one of 400 tokens does, and end or branch off anywhere."""
    said = prompt(1, 400)
    ends = [said[:n] for n in (chunk + 1, 129, 193, 211, 257, 399, 400)]
    return ends + [[*said[:n], *prompt(2, 90)] for n in (chunk, 64, 128, 150, 192, 260)]


@each_model
def test_a_hit_is_what_vllms_own_would_be(
    daemon: Daemon, engine: Any, shapes: list[GroupShape], chunk: int
) -> None:
    """Before 0.32 vLLM drops of a match with windows a block more than the drafter needs."""
    a, b = pair(engine, shapes, chunk)
    windows = any(kind == "sliding_window" for kind, *_ in shapes)
    hits = []
    for tokens in cases(chunk):
        local, found = local_hit(a, tokens), external_hit(b, tokens)
        # With a single group vLLM takes a prompt's last token not even for a proof.
        whole = len(tokens) == 400 and len(shapes) == 1
        longer = {0, chunk} if windows and before("0.32.0") else {chunk * whole}
        assert found - local in longer, (len(tokens), local)
        hits.append(found)
    assert len(set(hits)) > 1
    daemon.wait_until(leases=0, reservations=0, pins=0)


@each_model
def test_without_anything_spare_hits_are_longer(
    engine: Any, monkeypatch: pytest.MonkeyPatch, shapes: list[GroupShape], chunk: int
) -> None:
    """Negative control."""
    monkeypatch.setattr(configuration, "_spare_chunks", lambda *_: 0)
    a, b = pair(engine, shapes, chunk)
    states = any(kind == "state" for kind, *_ in shapes)
    tokens = [*prompt(1, 400)[:320], *prompt(2, 90)] if states else prompt(1, 399)
    assert external_hit(b, tokens) > local_hit(a, tokens)


def test_a_larger_chunk_leaves_at_least_a_block(daemon: Daemon, engine: Any) -> None:
    """Never more than vLLM's own, and less than two chunks fewer: what follows the last whole chunk
    is not known to the daemon."""
    a, b = pair(engine, GPT_OSS, 64)
    for tokens in cases(64):
        local, found = local_hit(a, tokens), external_hit(b, tokens)
        assert local - 128 < found <= local
        assert found % 64 == 0


def test_a_hit_goes_on_where_the_shortened_local_one_ends(daemon: Daemon, engine: Any) -> None:
    _, b = pair(engine, GPT_OSS, 64)
    tokens = prompt(1, 400)
    b.generate("own", tokens[:150])
    _, found = b.load("b", tokens)
    assert found == 320
    assert b.loads[-1].request == "b"


@pytest.mark.parametrize(
    ("drafts", "drafter", "flagged", "dropped", "spare"),
    [
        (2, "eagle", (), True, 1),
        (2, "eagle", (), False, 0),
        (2, "eagle", (1,), True, 1),
        (2, "ngram", (), True, 0),
        (0, "", (), True, 0),
        (0, "", (1,), True, 1),
    ],
)
def test_what_is_spare_is_decided_as_vllm_decides_it(
    drafts: int, drafter: str, flagged: tuple[int, ...], dropped: bool, spare: int
) -> None:
    extra: dict[str, object] = {"kvass.chunk_tokens": 64}
    config, caches = make_hybrid_configs(extra, GPT_OSS, drafts=drafts, drafter=drafter)
    for group in flagged:
        caches.kv_cache_groups[group].is_eagle_group = True
    if drafts:
        config.speculative_config.disable_eagle_block_drop = not dropped
    setup = read_setup(config, caches)
    assert setup.spare == spare
