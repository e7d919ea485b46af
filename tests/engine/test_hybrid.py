"""Models of several KV cache groups in real engines, vLLM's hybrid manager on: what a second
process loads instead of computing gives what it would have computed.

Every case says how much must be loaded; and for every group there is one in which its loaded pages
are zeroed, and the same check must fail.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvass import Client
from kvass.types import GroupLayout
from tests.engine.branching import branches, simulated
from tests.engine.hybrid import (
    GEMMA3,
    GPT_OSS,
    QWEN3_NEXT,
    Model,
    Pair,
    red,
    running_pair,
)
from tests.support.vllm.judge import Wrong, check_same
from tests.support.vllm.process import Prompt, Settings
from tests.support.vllm.ranks import until

pytestmark = pytest.mark.engine
MODELS = [GPT_OSS, GEMMA3, QWEN3_NEXT]
GPUS = ["ab", "a", "b"]
"""By model, which engines of its pair have their pages on fake GPUs."""


def name_of(model: Model) -> str:
    return model.blueprint.name


SLOW = pytest.param(GEMMA3, marks=pytest.mark.slow)
"""Two groups of equal windows, which test_scheduler_groups.py has with stand-ins for ranks."""


@pytest.fixture(scope="module", params=[GPT_OSS, SLOW, QWEN3_NEXT], ids=name_of)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    model: Model = request.param
    folder, gpus = tmp_path_factory.mktemp(name_of(model)), GPUS[MODELS.index(model)]
    with running_pair(model, folder, gpus=gpus) as one:
        yield one


def test_d1_the_hybrid_manager_is_on_and_groups_are_several(pair: Pair) -> None:
    found = [(name, group.block_tokens) for group in pair.groups() for name in group.specs]
    assert found == pair.model.groups
    (namespace,) = pair.daemon.status()["namespaces"]
    assert namespace["chunk_tokens"] == pair.model.chunk
    assert len(namespace["groups"]) == len(found)


def test_d8_warm_is_as_cold_around_every_boundary(pair: Pair) -> None:
    for size in pair.model.sizes:
        tokens = pair.prompt(size)
        pair.store(tokens)
        warm = pair.load(tokens)
        assert (warm.local, warm.external) == (0, pair.model.hit(size)), size
        pair.check(tokens, warm)


def test_the_next_turn(pair: Pair) -> None:
    question = pair.prompt(700)
    answer = pair.store(question, 100)
    turn = question + answer.tokens + pair.prompt(60)
    warm = pair.load(turn)
    computed = 700 if pair.model.retained else 799  # the last token's KV was never computed
    assert warm.external == pair.model.hit(len(turn), computed)
    pair.check(turn, warm)


def test_branches(pair: Pair) -> None:
    trunk = pair.prompt(600)
    first, second = trunk + pair.prompt(400), trunk + pair.prompt(300)
    pair.store(first)
    assert pair.b.reset()
    (branch,) = pair.b.store(Prompt(second, 6))
    assert branch.external == 0, "where they part neither a state nor a window was stored"
    pair.check(second, branch)
    third = pair.load(trunk + pair.prompt(200))
    assert third.external == (0 if pair.model.retained else 512)
    for tokens in (first, trunk, trunk + pair.prompt(20)):
        pair.check(tokens, pair.load(tokens))


@pytest.mark.slow  # test_scheduler_windows.py has it with stand-ins for ranks
@pytest.mark.parametrize("pair", [GPT_OSS, SLOW], indirect=True, ids=name_of)
def test_prompts_that_part_anywhere_hit_as_simulated_and_answer_as_computed(pair: Pair) -> None:
    """Windows are sparse, as they are by default."""
    prompts, hits, chunk = branches(5, 32, 1200, pair.model.chunk), list[int](), pair.model.chunk
    for tokens in prompts:
        assert pair.b.reset()
        (answer,) = pair.b.store(Prompt(tokens, 6))
        pair.check(tokens, answer)
        hits.append(answer.external)
    window = 128 if pair.model is GPT_OSS else 300
    groups = (
        GroupLayout("full", 32, ("full",), (4096,)),
        GroupLayout("sliding_window", 32, ("window",), (4096,), window),
    )
    assert hits == simulated(groups, chunk, prompts, None)
    assert sum(hit > 0 for hit in hits) > 8


def test_a_hit_that_continues_a_local_one(pair: Pair) -> None:
    """The engine has the beginning itself, up to the middle of a chunk."""
    tokens = pair.prompt(1000)
    pair.store(tokens)
    for begin in (161, 481):
        assert pair.b.reset()
        pair.b.one(tokens[:begin], 1, skip_prefix_cache=True)
        warm = pair.b.one(tokens, 6)
        assert warm.local <= begin
        assert warm.local + warm.external == pair.model.hit(1000)
        assert warm.local > 0
        pair.check(tokens, warm)


def test_several_at_once(pair: Pair) -> None:
    prompts = [pair.prompt(size) for size in (300, 1300, 900)]
    pair.a.store(*(Prompt(tokens, 2) for tokens in prompts))
    assert pair.b.reset()
    warm = pair.b.generate(*(Prompt(tokens, 6) for tokens in prompts))
    for tokens, answer in zip(prompts, warm, strict=True):
        assert answer.external == pair.model.hit(len(tokens))
        pair.check(tokens, answer)


def test_d2_d5_zeroed_pages_of_any_one_group_are_seen(pair: Pair) -> None:
    """The negative control. Each group is loaded for itself, also Gemma's two of equal windows:
    each breaks the output in its own way."""
    tokens = pair.prompt(1000)
    pair.store(tokens)
    right = pair.load(tokens)
    pair.check(tokens, right)
    seen = [right.logprobs]
    for group in range(len(pair.model.groups)):
        pair.spoil(group)
        wrong = pair.load(tokens)
        pair.spoil(None)
        assert wrong.external == pair.model.hit(1000)
        red(pair, tokens, wrong)
        seen.append(wrong.logprobs)
    assert all(seen.count(one) == 1 for one in seen)


@pytest.mark.parametrize("pair", [GPT_OSS, SLOW], indirect=True, ids=name_of)
def test_stores_that_come_late_from_blocks_nobody_holds_are_seen(pair: Pair) -> None:
    """The negative control of the store: vLLM uses blocks that left a window in the next step.

    Not for Qwen3-Next: a state that vLLM offers is one that it keeps.
    """
    prompts = [pair.prompt(1000 + 100 * i) for i in range(3)]

    def wrong_after_stores() -> int:
        assert pair.a.reset()
        pair.a.store(*(Prompt(tokens, 30) for tokens in prompts))
        warm = [pair.load(tokens) for tokens in prompts]
        assert all(answer.external for answer in warm)
        wrong = 0
        for tokens, answer in zip(prompts, warm, strict=True):
            try:
                pair.check(tokens, answer)
            except Wrong:
                wrong += 1
        return wrong

    pair.a.disturb(Settings(late_stores=2))
    assert wrong_after_stores() > 0
    pair.a.disturb(Settings())
    with Client(pair.daemon.socket) as client:
        client.clear(everything=True)
    assert wrong_after_stores() == 0


@pytest.mark.parametrize("pair", [QWEN3_NEXT], indirect=True, ids=name_of)
def test_a_new_daemon_gets_what_an_engine_answers_from_its_own_cache(pair: Pair) -> None:
    """vLLM reports no state then."""
    tokens = pair.prompt(1000)
    pair.store(tokens)
    pair.daemon.restart()

    def registered() -> list[bool]:
        engines = pair.daemon.status()["engines"]
        return [each["scheduler"] and not each["missing_ranks"] for each in engines]

    until(lambda: registered() == [True, True], "both engines")
    (again,) = pair.a.store(Prompt(tokens, 1))
    assert (again.local, again.external) == (pair.model.hit(1000), 0)
    warm = pair.load(tokens)
    assert (warm.local, warm.external) == (0, pair.model.hit(1000))
    pair.check(tokens, warm)


def test_nothing_is_owed_afterwards(pair: Pair) -> None:
    assert pair.a.reset()
    assert pair.b.reset()
    pair.daemon.wait_until(leases=0, reservations=0, pins=0, quarantined_bytes=0, rows_loading=0)


@pytest.mark.parametrize("kind", ["store", "load"])
def test_one_flipped_byte_of_any_group_ends_the_cache(pair: Pair, kind: str) -> None:
    for group in range(len(pair.model.groups)):
        tokens = pair.prompt(pair.model.chunk + 1)
        if kind == "load":
            pair.store(tokens)
        pair.b.verify_again()
        pair.b.disturb(Settings(flip=kind, flip_group=group))
        answer = pair.load(tokens)
        pair.b.disturb(Settings())
        assert f"rank 0: a {kind} in layer group {group} (" in pair.b.log()
        assert answer.cached == pair.load(tokens).cached == 0, "nothing is looked up any more"
        assert pair.a.reset()
        assert pair.a.one(tokens, 1).cached == 0, "for a second engine the namespace is empty"
        pair.b.verify_again()
        check_same(answer, pair.judge.cold(tokens, len(answer.tokens)))
