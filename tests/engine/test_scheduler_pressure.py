"""vLLM's real schedulers under pressure: whatever happens, some request goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any, Literal

import pytest

from kvass.client.lookups import Found
from kvass.engine import planner
from kvass.engine.load_admission import LoadAdmission
from tests.support.vllm.hybrid import GroupShape, make_hybrid_configs
from tests.support.vllm.pressure import IDLE, SHAPES, Engine, GroupClient, World
from tests.support.vllm.scheduler import CHUNK, SchedulerHarness

TOKENS = {"full": 416, "window": 416, "windows": 416, "state": 420}
"""Of a prompt: 13 chunks, after which vLLM keeps a state if more tokens follow."""
LOADS = {"full": 1, "window": 1, "windows": 2, "state": 2}
"""Loads of prompts that leave no room for one more, in a pool in which just one can be computed."""
RARE = ("failed", "preempted")
LEAST_WORLDS, MOST_WORLDS = 4, 16


def kinds() -> Iterator[Any]:
    """Of engines. Two of each shape are not slow; which they are alternates."""
    for number, shapes in enumerate(SHAPES):
        for how, policy in product(("sync", "async"), ("fcfs", "priority")):
            slow = ((how == "async") + (policy == "priority") + number) % 2
            marks = [pytest.mark.slow] * slow
            name = f"{shapes}-{how}-{policy}"
            yield pytest.param(shapes, how == "async", policy, marks=marks, id=name)


EVERY = pytest.mark.parametrize(("shapes", "asynchronous", "policy"), [*kinds()])


@pytest.fixture(autouse=True)
def every_step_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no request goes on because its last lookup was just now."""
    monkeypatch.setattr(planner, "ASK_AGAIN_S", 0.0)


@EVERY
def test_some_request_always_goes_on(shapes: str, asynchronous: bool, policy: str) -> None:
    """In half of the worlds an EAGLE model drafts. In half of them another connector loads, too. It
    never loads into windows: vLLM counts too few blocks for that, and kvass cannot hold it back.
    Worlds differ between processes, because strings have other hashes."""
    seen, windows = Counter[str](), any(kind == "sliding_window" for kind, *_ in SHAPES[shapes])
    for seed in range(MOST_WORLDS):
        if seed >= LEAST_WORLDS and min(seen[name] for name in RARE) > 0:
            break
        others = 0 if windows else seed % 2
        world = World(seed, asynchronous, policy, SHAPES[shapes], others, 2 * (seed // 2 % 2))
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        seen += world.seen
    assert min(seen[name] for name in ("loads", "aborts", "pending", "drafts")) > 5
    assert min(seen[name] for name in RARE) > 0


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("shapes", [SHAPES["window"], SHAPES["windows"]], ids=["window", "windows"])
def test_two_loads_that_fail_together_are_both_computed(
    shapes: list[GroupShape], asynchronous: bool
) -> None:
    """Computing needs more blocks of a window than loading, and vLLM has not reserved them. So the
    first has no room while the second holds blocks, and vLLM does not come to the second."""
    client, each = GroupClient(tails=False), 25 * len(shapes)
    configs = make_hybrid_configs({"kvass.chunk_tokens": CHUNK}, shapes, blocks=each + 15)
    world = SchedulerHarness(client, asynchronous=asynchronous, configs=configs)
    client.serve(world.planner._setup)
    prompts = {"a": range(400), "b": range(1000, 1400)}
    for name, tokens in prompts.items():
        world.add(f"writer of {name}", tokens, max_tokens=1)
        world.run(client)
    assert world.scheduler.reset_prefix_cache()
    for name, tokens in prompts.items():
        world.add(name, tokens)
    output, work = world.schedule()
    assert [load.request for load in work.loads] == [*prompts]
    world.finish(output, failed=[*prompts])
    assert world.free_blocks < each
    for _ in range(IDLE):
        world.step()
    assert not world.scheduler.has_unfinished_requests()


def room(shapes: str, answer: int, drafts: int = 0) -> int:
    """Blocks with which an engine can compute one of the prompts alone, and its answer."""
    states = sum(1 + drafts for kind, *_ in SHAPES[shapes] if kind == "state")
    block = SHAPES[shapes][0][1]
    tokens = TOKENS[shapes] + answer + 2 * drafts
    return 2 + states + len(SHAPES[shapes]) * -(-tokens // block)


def prompts(shapes: str) -> list[range]:
    """Four, of which the daemon of ``scene`` holds all but the first."""
    return [range(at, at + TOKENS[shapes]) for at in range(0, 4000, 1000)]


def scene(
    shapes: str,
    asynchronous: bool,
    policy: str = "fcfs",
    *,
    blocks: int = 0,
    drafts: int = 0,
    drafter: str = "eagle",
    client: GroupClient | None = None,
) -> Engine:
    """An engine, and a daemon that holds rows of prompts."""
    configs = make_hybrid_configs(
        {"kvass.chunk_tokens": CHUNK},
        SHAPES[shapes],
        blocks=blocks or room(shapes, 4),
        draft_states=drafts,
        drafts=drafts,
        drafter=drafter,
    )
    configs[0].scheduler_config.policy = policy
    engine = Engine(client or GroupClient(tails=False), asynchronous, configs, drafts)
    for tokens in prompts(shapes)[1:]:
        engine.world.add(f"writer of {tokens}", tokens, max_tokens=1)
        engine.run()
    assert engine.world.scheduler.reset_prefix_cache()
    return engine


def block(engine: Engine, shapes: str, prompt: int) -> None:
    """Add a request of one of the prompts, and behind it loads that leave no room for it. Its
    lookup is pending, so it is passed over. After the next step it has its answer, and no
    blocks."""
    loads = [f"load {number}" for number in range(LOADS[shapes])]
    engine.world.add("first", prompts(shapes)[prompt], priority=0)
    for name, tokens in zip(loads, prompts(shapes)[2:], strict=False):
        engine.world.add(name, tokens, priority=1)
    engine.client.pending = 1
    engine.step()
    assert [*engine.loads] == loads
    engine.step()
    assert [*engine.loads] == loads
    assert engine.client.lookups[-1] == ("first", 0)
    assert not engine.client.pending
    assert not engine.world.scheduler.running


SHAPED = pytest.mark.parametrize("shapes", SHAPES)
BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@pytest.mark.parametrize("fails", [False, True], ids=["loaded", "failed"])
@EVERY
def test_a_miss_after_a_pending_lookup_ahead_of_a_load(
    shapes: str, asynchronous: bool, policy: str, fails: bool
) -> None:
    """The request needs blocks that a load behind it holds. So once that load has ended, its
    request must be reached."""
    engine = scene(shapes, asynchronous, policy)
    block(engine, shapes, 0)
    engine.loads = {name: (ends, fails) for name, (ends, _) in engine.loads.items()}
    engine.run()
    assert engine.seen["failed"] == fails * LOADS[shapes]


@pytest.mark.parametrize("endless", ["lookup", "load"])
def test_a_standstill_is_seen(endless: str) -> None:
    """The control of the tests here."""
    engine = scene("full", False)
    block(engine, "full", 0)
    if endless == "lookup":
        engine.client.pending = 1 << 30
    else:
        engine.loads = dict.fromkeys(engine.loads, (1 << 30, False))
    with pytest.raises(AssertionError, match="WAITING"):
        engine.run()


@EVERY
def test_full_hits_that_fill_the_pool_with_drafts(
    shapes: str, asynchronous: bool, policy: str
) -> None:
    """Each needs more blocks as soon as it decodes, for its tokens and its drafts. Without EAGLE a
    hit has all chunks of the prompt."""
    drafter = "eagle" if asynchronous or policy == "priority" else "ngram"
    blocks, seen = room(shapes, 160, 2), Counter[str]()
    for more in range(2 * blocks):
        engine = scene(
            shapes, asynchronous, policy, blocks=blocks + more, drafts=2, drafter=drafter
        )
        for number, tokens in enumerate(prompts(shapes)[1 : LOADS[shapes] + 2]):
            engine.world.add(f"hit {number}", tokens, max_tokens=160, priority=-number)
        engine.step()
        seen["together"] += len(engine.loads) == LOADS[shapes] + 1
        engine.run()
        assert engine.seen["drafts"] > 10
        seen["preempted"] += engine.seen["preempted"]
        if seen["together"] == 2:
            break
    assert seen["together"] == 2
    assert seen["preempted"] > 0, "they had no room for all their answers"


class TwoLoads(Engine):
    """Two requests of which the daemon holds the first ``HIT`` tokens. The others are computed in
    one step. With a window, vLLM reserves no blocks for that: a request longer than the window and
    a step has had as many blocks as it may ever hold at once."""

    HIT, STEP = 320, 96

    def __init__(self, shapes: list[GroupShape], asynchronous: bool, policy: str, blocks: int):
        configs = make_hybrid_configs(
            {"kvass.chunk_tokens": CHUNK}, shapes, blocks=blocks, batched=self.STEP
        )
        configs[0].scheduler_config.policy = policy
        super().__init__(GroupClient(tails=False), asynchronous, configs)
        texts = [range(at, at + self.HIT + self.STEP) for at in (0, 1000)]
        for tokens in texts:
            self.world.add(f"writer of {tokens}", tokens[: self.HIT], max_tokens=1)
            self.run()
        assert self.world.scheduler.reset_prefix_cache()
        for number, tokens in enumerate(texts):
            self.world.add(f"hit {number}", tokens, priority=number)
        self.step()


WINDOWED = pytest.mark.parametrize("shapes", [SHAPES["window"], SHAPES["windows"]])
BLOCKS = range(54, 108, 6)
"""Sizes of the pool: from one that just has room for one of the requests."""


@BOTH
@WINDOWED
def test_two_loads_with_much_to_compute_in_a_window(
    shapes: list[GroupShape], asynchronous: bool
) -> None:
    policy, seen = "priority" if asynchronous else "fcfs", Counter[int]()
    for blocks in BLOCKS:
        engine = TwoLoads(shapes, asynchronous, policy, blocks)
        seen[len(engine.loads)] += 1
        engine.run()
    assert seen[1] > 0
    assert seen[2] > 0


@BOTH
@WINDOWED
def test_such_loads_begun_together_come_to_a_standstill(
    shapes: list[GroupShape], asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: this is what ``load_admission.py`` is for. If it passes, vLLM counts right."""
    monkeypatch.setattr(LoadAdmission, "admits", lambda *_: True)
    engine = TwoLoads(shapes, asynchronous, "fcfs", 30 + 12 * len(shapes))
    assert len(engine.loads) == 2
    with pytest.raises(AssertionError, match="WAITING"):
        engine.run()
    assert engine.world.scheduler.requests["hit 0"].status.name == "WAITING", "its load has ended"
    assert waiting(engine) == {"hit 0", "hit 1"}


def waiting(engine: Engine) -> set[str]:
    """The requests that hold blocks and wait."""
    requests = engine.world.planner._requests
    return {name for name, state in requests.items() if state.request.waits_with_blocks}


def test_which_requests_hold_blocks_and_wait() -> None:
    """Those that load, and those whose load has ended, until they run. The failed load ends when
    vLLM comes to its request, which has no blocks then."""
    engine = TwoLoads(SHAPES["window"], False, "fcfs", BLOCKS[-1])
    assert waiting(engine) == {*engine.loads} == {"hit 0", "hit 1"}
    engine.loads = {"hit 0": (engine.now, False), "hit 1": (engine.now, True)}
    engine.step()
    assert not engine.loads
    assert waiting(engine) == {"hit 0", "hit 1"}
    engine.step()
    assert waiting(engine) == {"hit 1"}, "its turn has not come"
    engine.step()
    assert len(engine.world.scheduler.running) == 2
    assert waiting(engine) == set()
    engine.run()


class Lapsing(GroupClient):
    """A lease has ended whenever its request is looked up again. What that finds: ``then``."""

    then: Literal["hit", "miss", "pending"] = "hit"
    lapsed = 0

    def look_up(self, request: str, *args: Any, **options: Any) -> Found:
        """A new lookup."""
        if request in self.held:
            self.give_back(request)
            self.lapsed += 1
            self.pending = int(self.then == "pending")
            if self.then == "miss":
                self.rows.clear()
        return super().look_up(request, *args, **options)


@pytest.mark.parametrize("then", ["hit", "miss", "pending"])
@BOTH
@SHAPED
def test_a_lease_that_ends_while_allocation_fails(
    shapes: str, asynchronous: bool, then: Literal["hit", "miss", "pending"]
) -> None:
    client = Lapsing(tails=False)
    client.then = then
    engine = scene(shapes, asynchronous, client=client)
    block(engine, shapes, 1)
    assert [*client.held] == ["first"], "it hits, and has no room"
    engine.run()
    assert client.lapsed > 0
