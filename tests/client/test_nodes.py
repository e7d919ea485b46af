"""The scheduler's client of an engine whose ranks reach several daemons. Sockets and steps are
lists here: a test says what each daemon answers, and when.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvass.client.connection import DaemonConnection
from kvass.client.lookups import ANSWER_S, PENDING, Match
from kvass.client.nodes import NodesClient
from kvass.client.parallel import ParallelStrategy
from kvass.client.reached import APART_STEPS, RankNews, Reached
from kvass.client.reconnecting import CLOSE_S
from kvass.client.requests import OpenRequests
from kvass.client.steps import ANSWERED_S, FromAgent, Relay, StepClient, ToAgent
from kvass.client.worker import WorkerClient
from kvass.engine.boundary import Boundary
from kvass.engine.node_rank import NodeRank
from kvass.engine.nodes import NodesWork, NodeWork, SharedWork
from kvass.errors import Unavailable
from kvass.messages import (
    Abort,
    AnyMessage,
    Clear,
    Cleared,
    Error,
    FromDaemon,
    Grant,
    Granted,
    HandedOver,
    Lookup,
    Matched,
    Prefetched,
    Promoting,
    Register,
    Registered,
    Release,
    RequestContext,
    Reserve,
    ReserveItem,
    Welcome,
)
from kvass.types import Slots, Timing
from tests.core.rig import layout

CHUNK = 256
WIDTH = 32
KEYS = bytes(range(8)) * WIDTH
FAR_S = 1e6
"""How far the clocks of other nodes are ahead."""
PATIENT = Timing(lookup_budget_ms=20_000.0)
"""Of the daemons: a machine that stands still in the middle of a test gives up no lookup."""


class ListChannel:
    """The socket of the scheduler's own daemon. ``sent``: what the daemon got. ``answers``: what
    it says next."""

    waits, wants_write = True, False

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.answers: list[FromDaemon] = []
        self.fails = False

    def send(self, message: AnyMessage) -> None:
        if self.fails:
            raise Unavailable("it is gone")
        self.sent.append(message)
        if isinstance(message, Register):
            self.answers.append(Registered(seq=message.seq))

    def receive(self, timeout_s: float) -> list[FromDaemon]:
        said, self.answers = self.answers, []
        return said

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        pass

    drop = close


def boot(node: int, life: int = 0) -> bytes:
    return bytes([node, life]) * 8


def rows(count: int) -> tuple[Slots, ...]:
    return (
        Slots(((0,),), b"\0\0" * count, b"".join(i.to_bytes(4, "little") for i in range(count))),
    )


class World:
    """A scheduler whose rank ``n`` reaches daemon ``n``, or ``where[n]``."""

    def __init__(
        self,
        nodes: int = 2,
        cuts: bool = True,
        daemons: int | None = None,
        where: Sequence[int] = (),
    ) -> None:
        strategy = ParallelStrategy(tp=nodes)
        terms = strategy.register("engine", {"model": "tiny"}, CHUNK)

        def registered(ranks: Iterable[int], daemons: int) -> tuple[Register, tuple[int, ...]]:
            here = strategy.on(ranks, daemons)
            return here.register("engine", {}, CHUNK), here.readers

        self.client = NodesClient(
            "",
            terms,
            ranks=nodes,
            registered=registered,
            cuts=cuts,
            tokens=lambda chunks, blocks: chunks * CHUNK + blocks * 32,
        )
        self.client.start = lambda: None  # type: ignore[method-assign]
        self.client._reserve_wait_s = self.client.step.wait_s = self.client.step.left_s = 0.0
        self.daemons = nodes if daemons is None else daemons
        self.epochs = itertools.count(1)
        self.leases = itertools.count(1)
        self.steps = itertools.count(1)
        self.connect_own()
        where = where or [min(rank, self.daemons - 1) for rank in range(nodes)]
        self.all_say(*map(boot, where))
        self.client.new_step()
        if self.client.connection is None:  # it registers as a part of its node
            self.connect_own()
        for number in range(len(self.others)):
            self.step(number)
            self.connect(number)

    def all_say(self, *boots: bytes, steps: int = 2) -> None:
        """All ranks say in so many steps where they are."""
        for _ in range(steps):
            self.client.reported({rank: RankNews(boot) for rank, boot in enumerate(boots)})

    def answers(self) -> bool:
        """Whether all daemons answer."""
        return self.client.answering

    @property
    def others(self) -> tuple[StepClient, ...]:
        return self.client.others

    def connect_own(self, life: int = 0) -> None:
        self.own = ListChannel()
        connection = DaemonConnection(self.own, "own")
        connection.welcome = Welcome(boot=boot(0, life), timing=PATIENT)
        connection.registration = self.client.registration
        self.client._connected(connection)

    def restart_own(self) -> None:
        """The scheduler's daemon is restarted."""
        connection = self.client.connection
        assert connection is not None
        with self.client.lock:
            self.client.lose(connection, Unavailable("it was killed"))
        self.connect_own(life=1)

    def run_steps(self, count: int = 3) -> None:
        """Steps that bring nothing."""
        for _ in range(count):
            self.client.new_step()
            while self.client._ended < self.client._step:
                self.client.step_ended()

    def connect(self, number: int = 0, life: int = 0) -> None:
        """The agent of a node has connected."""
        node = self.others[number]
        welcome = Welcome(boot=boot(number + 1, life), timing=PATIENT)
        self.tell(number, FromAgent(9, next(self.epochs), "", welcome, node.registration))

    def tell(self, number: int, news: FromAgent) -> None:
        ranks = self.client.nodes[number + 1]
        news.count = self.others[number]._heard + 1
        self.client.reported({ranks[0]: RankNews(b"", self.client.form, news)})

    def step(self, number: int = 0) -> tuple[list[Any], list[Any]]:
        """What a step brings to the agent of a node, and to all its ranks."""
        to, settled = self.others[number].outgoing(next(self.steps), 0)
        return list(to.messages), settled

    def answer(self, number: int, *answers: FromDaemon, read_s: float | None = None) -> None:
        """The daemon of a node answered, and its agent returned that."""
        channel = self.others[number]._channel
        assert channel is not None
        read_s = time.monotonic() + FAR_S if read_s is None else read_s
        told = [(one, read_s) for one in answers]
        self.tell(number, FromAgent(self.others[number]._number, channel.epoch, "", answers=told))

    def matched(self, question: Lookup, chunks: int, node: int = 0, **more: Any) -> Matched:
        now = time.monotonic() + (FAR_S if node else 0.0)
        lent = chunks > question.first or more.get("blocks")
        return Matched(
            seq=question.seq,
            boot=boot(node),
            lease=next(self.leases) if lent else 0,
            first=question.first,
            chunks=chunks,
            given_s=now,
            deadline_s=now + 60,
            slots=rows(chunks - question.first),
            **more,
        )

    def look_up(self, chunks: int = 8) -> Any:
        return self.client.look_up("r", KEYS[: chunks * WIDTH], WIDTH, 0)

    def ask(self, own: int, chunks: int = 8) -> list[Lookup]:
        """Ask for ``chunks``, of which the own daemon has ``own``; the questions to the others."""
        assert self.look_up(chunks).match is PENDING
        self.own.answers.append(self.matched(self.own.sent[-1], own))
        assert self.look_up(chunks).match is PENDING
        return [self.step(number)[0][-1] for number in range(len(self.others))]

    def hit(self, *chunks: int) -> Match:
        """A match of which the nodes have so many chunks."""
        for number, question in enumerate(self.ask(chunks[0])):
            self.answer(number, self.matched(question, chunks[number + 1], number + 1))
        match = self.look_up().match
        assert isinstance(match, Match)
        return match


# ---------------------------------------------------------------- which nodes there are


def test_with_one_daemon_nothing_is_asked_twice_and_nobody_registers_anew() -> None:
    world = World(daemons=1)
    assert world.client.nodes == ((0, 1),)
    assert not world.others
    assert world.client.form == 1
    assert world.answers()
    assert world.own.sent == []
    assert world.look_up().match is PENDING
    world.own.answers.append(world.matched(world.own.sent[-1], 3))
    match = world.look_up().match
    assert match.chunks == 3
    assert match.boot == boot(0)
    assert not world.client.owes


def test_nothing_is_stored_before_all_ranks_have_said_which_daemon_they_reach() -> None:
    world = World()
    assert world.answers()
    world.client.nodes = ()
    assert not world.answers()
    assert world.client.begin_reserve([ReserveItem("r", KEYS)], WIDTH) is None


def test_ranks_of_one_node_are_an_engine_to_its_daemon() -> None:
    world = World(3, daemons=2)
    assert world.client.nodes == ((0,), (1, 2))
    (node,) = world.others
    terms = node.registration
    assert terms is not None
    assert (terms.rank, terms.ranks) == (-1, 2)
    assert terms.instance == "engine, ranks 1-2 of 3, 1 more daemon"
    own = world.client.registration
    assert own is not None
    assert own.instance == "engine, ranks 0 of 3, 1 more daemon"
    assert terms.identity == {
        "model": "tiny",
        "node": "ranks 1-2 of 3: tp 3, pp 1, replicas 1",
    }
    assert node.lookups.readers == (0, 1)


def test_ranks_that_are_not_side_by_side_are_named_whole() -> None:
    world = World(4, where=(0, 1, 2, 1))
    one, other = world.others
    assert (one.name, other.name) == ("ranks 1, 3 of 4", "ranks 2 of 4")
    assert one.registration is not None
    assert one.registration.instance == "engine, ranks 1, 3 of 4, 2 more daemons"


def test_the_first_nodes_are_of_what_all_ranks_say_in_two_steps() -> None:
    """The daemon of two ranks is restarted while the engine starts, and one of them came late."""
    world = World(3, daemons=2)
    world.client.reached, world.client.nodes = Reached(3), ()
    world.client.reported({0: RankNews(boot(0)), 1: RankNews(boot(1))})
    world.client.reported({2: RankNews(boot(1, 1))})
    for _ in range(2):
        world.run_steps()
        assert (world.client.nodes, world.client.form) == ((), 1)
        world.client.reported({0: RankNews(boot(0)), 2: RankNews(boot(1, 1))})
    world.all_say(boot(0), boot(1, 1), boot(1, 1))
    world.client.new_step()
    assert [node.name for node in world.others] == ["ranks 1-2 of 3"]


def test_a_daemon_that_is_restarted_makes_no_new_nodes() -> None:
    """Its ranks notice it one after the other."""
    world = World(3, daemons=2)
    for rank in (1, 2):
        world.client.reported({rank: RankNews(boot(1, 1))})
        world.run_steps()
        assert world.client.form == 1
    world.client.reported({1: RankNews(boot(2))})
    world.run_steps()
    assert world.client.form == 1
    world.all_say(boot(0), boot(2), boot(1, 1))
    world.client.new_step()
    assert world.client.nodes == ((0,), (1,), (2,))
    assert world.client.form == 2


def test_ranks_that_speak_at_different_times_of_one_step_make_no_new_nodes() -> None:
    """Their daemon is restarted after one of them spoke, and before the other does."""
    world = World(3, daemons=2)
    world.client.reported({1: RankNews(boot(1, 1))})
    world.run_steps()
    world.all_say(boot(0), boot(1, 1), boot(1), steps=1)
    world.run_steps()
    world.all_say(boot(0), boot(1, 1), boot(1, 1))
    world.run_steps()
    assert (world.client.nodes, world.client.form) == (((0,), (1, 2)), 1)


def test_ranks_that_report_late_because_the_engine_was_idle_make_no_new_nodes() -> None:
    """Nobody reports while there is no step."""
    world = World(3, daemons=1)
    world.restart_own()
    for rank in (0, 1, 2):
        world.client.reported({rank: RankNews(boot(0, 1))})
        world.run_steps()
        assert (world.client.nodes, world.client.form) == (((0, 1, 2),), 1)
    world.all_say(*[boot(0, 1)] * 3)
    world.run_steps()
    assert (world.client.nodes, world.client.form) == (((0, 1, 2),), 1)


def test_an_agent_that_was_lost_makes_no_other_nodes_while_ranks_may_still_report() -> None:
    world = World(3, where=(0, 0, 1))
    world.restart_own()
    world.client.reported({0: RankNews(boot(0, 1))})
    world.tell(0, FromAgent(9, 0, "it was ended"))
    world.connect()
    assert world.others[0].astray
    world.client.new_step()
    assert (world.client.nodes, world.client.form) == (((0, 1), (2,)), 1)
    world.client.reported({1: RankNews(boot(0, 1))})
    world.client.new_step()
    assert (world.client.nodes, world.client.form) == (((0, 1), (2,)), 2)


def test_ranks_that_reach_one_daemon_again_are_no_node_any_more() -> None:
    world = World()
    world.all_say(boot(0), boot(0))
    world.client.new_step()
    assert world.client.nodes == ((0, 1),)
    own = world.client.registration
    assert own is not None
    assert (own.instance, own.identity) == ("engine", {"model": "tiny"})


def test_a_rank_that_is_no_part_of_a_node_any_more_registers_so() -> None:
    terms = ParallelStrategy(tp=2, rank=1).register("engine", {"model": "m"}, CHUNK, layout(1))
    client = WorkerClient("", terms)
    strategy = ParallelStrategy(tp=2, rank=1)
    copier: Any = SimpleNamespace(client=client, strategy=strategy, daemon=("", None))
    rank, registered = NodeRank(copier, Boundary()), list[tuple[int, dict[str, str]]]()
    for form, nodes in enumerate((((0,), (1,)), ((0, 1),)), 1):
        works = tuple(NodeWork(ranks, known=[(b"", "")] * len(ranks)) for ranks in nodes)
        rank.own_part(SharedWork(nodes=NodesWork(form, "engine", works)))
        assert client.registration is not None
        registered.append((client.registration.ranks, client.registration.identity))
    node = {"model": "m", "node": "ranks 1 of 2: tp 2, pp 1, replicas 1"}
    assert registered == [(1, node), (2, {"model": "m"})]


# ---------------------------------------------------------------- hits


def test_a_miss_of_the_own_daemon_is_a_miss_and_nobody_else_is_asked() -> None:
    world = World()
    assert world.look_up().match is PENDING
    world.own.answers.append(world.matched(world.own.sent[-1], 0, why="absent"))
    found = world.look_up()
    assert (found.match, found.why) == (None, "absent")
    assert world.step() == ([], [])


@pytest.mark.parametrize("chunks", [(5, 5, 5), (5, 3, 5), (5, 5, 3), (2, 2, 1)])
def test_a_hit_is_what_all_nodes_have(chunks: tuple[int, ...]) -> None:
    world = World(3)
    match = world.hit(*chunks)
    assert match.chunks == min(chunks)
    assert [len(each) for each in match.slots] == [min(chunks)]
    found = world.look_up()
    assert (found.why == "other_node") == (min(chunks) < chunks[0])
    if min(chunks) < chunks[0]:
        least = chunks.index(min(chunks))
        assert found.detail == (
            f"ranks {least} of 3 had {min(chunks) * CHUNK:,} of {chunks[0] * CHUNK:,} tokens"
        )


def test_the_others_are_asked_for_what_the_own_daemon_has() -> None:
    world = World()
    (question,) = world.ask(own=5)
    assert len(question.digests) == 5 * WIDTH
    assert not question.reported


def test_what_a_client_is_told_is_retained_is_retained_on_all_nodes() -> None:
    world = World()
    assert world.look_up().match is PENDING
    world.own.answers.append(world.matched(world.own.sent[-1], 5, kept=5))
    assert world.look_up().match is PENDING
    ((question,), _) = world.step()
    world.answer(0, world.matched(question, 5, 1, kept=2))
    assert world.look_up().kept == 2


def test_a_node_that_has_nothing_makes_it_a_miss_and_all_leases_are_given_back() -> None:
    world = World(3)
    one, other = world.ask(own=5)
    world.answer(0, lent := world.matched(one, 5, 1))
    world.answer(1, world.matched(other, 0, 2))
    found = world.look_up()
    assert (found.match, found.why) == (None, "other_node")
    assert [message.lease for message in world.own.sent if isinstance(message, Release)] == [1]
    assert world.step(0)[1] == [Release(boot=boot(1), lease=lent.lease)]
    assert world.step(1)[1] == []


def test_a_hit_inside_a_chunk_is_what_all_nodes_have_of_it() -> None:
    world = World()

    def blocks(chunk: int) -> bytes:
        return bytes([chunk]) * WIDTH * 7

    def look_up() -> Any:
        return world.client.look_up("r", KEYS[: 2 * WIDTH], WIDTH, 0, blocks=blocks)

    assert look_up().match is PENDING
    world.own.answers.append(world.matched(world.own.sent[-1], 2, blocks=5))
    assert look_up().match is PENDING
    (question,) = world.step()[0]
    assert len(question.blocks) == 5 * WIDTH
    world.answer(0, world.matched(question, 2, 1, blocks=3))
    match = look_up().match
    assert (match.chunks, match.blocks) == (2, 3)


def test_all_nodes_share_the_time_of_a_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    assert world.look_up().match is PENDING
    own, now_s = world.own.sent[-1], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now_s() + own.budget_ms / 4000)
    world.own.answers.append(world.matched(own, 8))
    assert world.look_up().match is PENDING
    (other,) = world.step()[0]
    assert 0 < other.budget_ms <= own.budget_ms * 3 / 4 + 1


def promoting(world: World, chunks: int = 8, **more: Any) -> Lookup:
    """The own daemon loads from a tier; the question to the other one."""
    ask = partial(world.client.look_up, "r", KEYS[: chunks * WIDTH], WIDTH, 0, **more)
    assert ask().match is PENDING
    assert world.step() == ([], [])
    world.own.answers.append(Promoting(seq=world.own.sent[-1].seq))
    found = ask()
    assert (found.match, found.promoting) == (PENDING, True)
    ((question,), _) = world.step()
    assert isinstance(question, Lookup)
    return question


def test_while_the_own_daemon_loads_from_tiers_the_others_load_too() -> None:
    world = World()
    question, own = promoting(world), world.own.sent[-1]
    assert question.digests == own.digests
    assert own.budget_ms - 50 < question.budget_ms <= own.budget_ms
    world.answer(0, lent := world.matched(question, 6, 1))
    assert world.look_up().match is PENDING
    world.own.answers.append(world.matched(own, 5))
    match = world.look_up().match
    assert isinstance(match, Match)
    assert match.chunks == 5
    assert world.step() == ([], []), "it is not asked again"
    assert world.client.take("r")
    assert world.client.lent.to_read(match.lease)[1].number == lent.lease


def test_a_miss_of_the_own_daemon_gives_back_what_others_loaded() -> None:
    world = World()
    question = promoting(world)
    world.answer(0, lent := world.matched(question, 6, 1))
    assert world.look_up().match is PENDING
    world.own.answers.append(world.matched(world.own.sent[-1], 0, why="evicted"))
    found = world.look_up()
    assert (found.match, found.why) == (None, "evicted")
    assert world.step() == ([], [Release(boot=boot(1), lease=lent.lease)])


@pytest.mark.parametrize("has", [0, 5])
def test_a_node_that_can_load_nothing_is_asked_once_and_the_own_daemon_says_why(has: int) -> None:
    """It knows whether anybody stored it, and counts the lookup."""
    world = World()
    question, own = promoting(world), world.own.sent[-1]
    world.answer(0, world.matched(question, 0, 1, why="absent"))
    for _ in range(2):
        assert world.look_up().match is PENDING
        assert world.step() == ([], [])
    world.own.answers.append(lent := world.matched(own, has, why="evicted"))
    found = world.look_up()
    assert (found.match, found.why) == (None, "other_node" if has else "evicted")
    if has:
        assert found.detail == "ranks 1 of 2 had 0 of 1,280 tokens"
        assert world.own.sent[-1] == Release(boot=boot(0), lease=lent.lease)
    assert world.step() == ([], [])


@pytest.mark.parametrize("cuts", [True, False])
def test_nobody_waits_for_what_others_load_and_the_own_daemon_could_not(cuts: bool) -> None:
    world = World(cuts=cuts)
    late, own = promoting(world), world.own.sent[-1]
    world.answer(0, Promoting(seq=late.seq))
    world.own.answers.append(world.matched(own, 1))
    assert world.look_up().match is PENDING
    ((question,), _) = world.step()
    assert len(question.digests) == WIDTH
    assert world.look_up().match is PENDING
    assert world.step() == ([], []), "it is asked once"
    world.answer(0, world.matched(question, 1, 1))
    assert world.look_up().match.chunks == 1
    assert not world.client.owes, "the request makes steps"
    world.answer(0, lent := world.matched(late, 8, 1))
    assert world.step() == ([], [Release(boot=boot(1), lease=lent.lease)])


def test_a_node_that_could_not_be_asked_is_asked_in_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    assert world.look_up().match is PENDING
    own = world.own.sent[-1]
    world.own.answers.append(Promoting(seq=own.seq))
    with monkeypatch.context() as full:
        full.setattr(OpenRequests, "room", False)
        assert world.look_up().match is PENDING
    assert world.step() == ([], [])
    assert world.look_up().match is PENDING
    ((question,), _) = world.step()
    world.own.answers.append(world.matched(own, 8))
    world.answer(0, world.matched(question, 8, 1))
    assert world.look_up().match.chunks == 8


def test_windows_that_others_loaded_are_asked_for_again_as_far_as_the_own_daemon_goes() -> None:
    world = World(cuts=False)
    question = promoting(world)
    world.answer(0, world.matched(question, 8, 1))
    assert world.look_up().match is PENDING
    for own, other in ((6, 5), (4, 4)):  # the first question takes none of the rounds
        world.own.answers.append(world.matched(world.own.sent[-1], own))
        assert world.look_up().match is PENDING
        (question,), (longer,) = world.step()
        assert len(question.digests) == own * WIDTH
        assert isinstance(longer, Release)
        world.answer(0, world.matched(question, other, 1))
        match = world.look_up().match
    assert isinstance(match, Match)
    assert match.chunks == 4


@pytest.mark.parametrize("has", [4, 2, 1])
def test_blocks_after_what_the_own_daemon_has_are_asked_for_once_and_only_if_of_use(
    has: int,
) -> None:
    world = World()

    def blocks(chunk: int) -> bytes:
        return bytes([chunk]) * WIDTH * 7

    def look_up() -> Any:
        return world.client.look_up("r", KEYS[: 5 * WIDTH], WIDTH, 0, blocks=blocks)

    question = promoting(world, 5, blocks=blocks)
    world.own.answers.append(world.matched(world.own.sent[-1], 2))
    assert look_up().match is PENDING
    assert world.own.sent[-1].again
    world.own.answers.append(world.matched(world.own.sent[-1], 2, blocks=3))
    world.answer(0, world.matched(question, has, 1))
    match, (again, _) = look_up().match, world.step()
    if has > 2:
        assert again == []
    else:
        (question,) = again
        assert question.blocks == blocks(has)[: (3 if has == 2 else 7) * WIDTH]
        world.answer(0, world.matched(question, has, 1, blocks=2))
        match = look_up().match
    assert (match.chunks, match.blocks) == ((2, 3) if has > 2 else (has, 2))


@pytest.mark.parametrize(
    ("steps_s", "most_s"),
    [((0.2,), 0.8), ((0.6,), 0.6), ((2.0,), 1.0), ((0.8, 0.1), 0.9)],
)
def test_an_answer_at_its_deadline_comes_in_time_whatever_steps_take(
    monkeypatch: pytest.MonkeyPatch, steps_s: tuple[float, ...], most_s: float
) -> None:
    """Else a promotion that takes all its time on another node would give nothing. A
    question may take what the step takes that brings its answer, and only the last step counts."""
    world, now_s, ticks = World(), 1000.0, itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + next(ticks) * 1e-7)
    for step_s in steps_s:
        (question,) = world.ask(own=5)
        now_s += step_s
        world.answer(0, world.matched(question, 5, 1))
        assert isinstance(world.look_up().match, Match)
        world.client.give_back("r")
        world.step()
    world.client.lookups.budget_s = 1.0
    (question,) = world.ask(own=5)
    assert question.budget_ms == pytest.approx(1000 * (most_s - ANSWER_S), abs=0.1)


def test_why_a_hit_is_short_is_about_its_own_question() -> None:
    world = World()
    world.hit(8, 5)
    assert world.look_up().why == "other_node"
    world.client.lookups.restart("r")
    world.others[0].lookups.restart("r")
    (question,) = world.ask(own=8)
    world.answer(0, world.matched(question, 8, 1))
    found = world.look_up()
    assert found.match.chunks == 8
    assert (found.why, found.detail) == ("", "")


def test_another_question_of_a_request_asks_for_all_of_it() -> None:
    world = World(cuts=False)
    (question,) = world.ask(own=8)
    world.answer(0, world.matched(question, 6, 1))
    assert world.look_up().match is PENDING
    assert len(world.own.sent[-1].digests) == 6 * WIDTH
    assert world.client.look_up("r", KEYS, WIDTH, 1).match is PENDING
    assert len(world.own.sent[-1].digests) == len(KEYS)


def test_windows_are_asked_for_again_and_at_most_twice() -> None:
    world = World(cuts=False)
    (question,) = world.ask(own=8)
    world.answer(0, world.matched(question, 6, 1))
    assert world.look_up().match is PENDING
    assert len(world.own.sent[-1].digests) == 6 * WIDTH
    world.own.answers.append(world.matched(world.own.sent[-1], 5))
    assert world.look_up().match is PENDING
    (question,), (longer,) = world.step()
    assert len(question.digests) == 5 * WIDTH
    assert isinstance(longer, Release)
    world.answer(0, world.matched(question, 4, 1))
    found = world.look_up()
    assert (found.match, found.why) == (None, "other_node")
    assert [type(one) for one in world.step()[1]] == [Release]


def test_equal_windows_are_a_hit() -> None:
    world = World(cuts=False)
    (question,) = world.ask(own=8)
    world.answer(0, world.matched(question, 6, 1))
    assert world.look_up().match is PENDING
    world.own.answers.append(world.matched(world.own.sent[-1], 6))
    found = world.look_up()
    assert isinstance(found.match, Match)
    assert found.match.chunks == 6
    assert found.detail == "ranks 1 of 2 had 1,536 of 2,048 tokens"


def test_an_answer_of_an_older_question_does_not_count() -> None:
    world = World()
    (old,) = world.ask(own=5)
    world.client.give_back("r")  # preempted, or aborted
    (new,) = world.ask(own=5)
    world.answer(0, late := world.matched(old, 5, 1))
    assert world.look_up().match is PENDING
    assert world.step()[1] == [Release(boot=boot(1), lease=late.lease)]
    world.answer(0, world.matched(new, 2, 1))
    match = world.look_up().match
    assert isinstance(match, Match)
    assert match.chunks == 2


def test_steps_go_on_until_what_nobody_waits_for_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only a step fetches what a node lent, and this engine has no other request."""
    for answers in (True, False):
        world = World()
        (question,) = world.ask(own=5)
        world.answer(0, Promoting(seq=question.seq))
        assert world.look_up().match is PENDING
        world.client.give_back("r")
        for _ in range(3):
            world.client.new_step()
            world.client.outgoing()
            world.client.step_ended()
            assert world.client.owes
        if answers:
            world.answer(0, lent := world.matched(question, 5, 1))
            assert world.step()[1] == [Release(boot=boot(1), lease=lent.lease)]
        else:  # its daemon is stopped
            later = time.monotonic() + question.budget_ms / 1000 + 2 * ANSWERED_S
            monkeypatch.setattr(time, "monotonic", lambda at=later: at)
        assert not world.client.owes


@pytest.mark.parametrize("misses", ["own", "another"])
def test_no_step_is_made_for_what_others_load_of_a_miss(misses: str) -> None:
    """The request itself makes steps. After them the engine is idle, however long a tier takes."""
    world = World(3)
    question, own = promoting(world), world.own.sent[-1]
    ((second,), _) = world.step(1)
    for number, one in enumerate((question, second)):
        world.answer(number, Promoting(seq=one.seq))
    if misses == "another":
        world.answer(1, world.matched(second, 0, 2))
    world.own.answers.append(world.matched(own, 0 if misses == "own" else 8))
    assert world.look_up().match is None
    world.client.give_back("r")
    world.step()
    world.step(1)
    world.answer(0)
    world.answer(1)
    assert not world.client.owes
    world.answer(0, lent := world.matched(question, 5, 1))
    assert world.step()[1] == [Release(boot=boot(1), lease=lent.lease)]


def test_no_step_is_made_for_a_prefetch_that_goes_on() -> None:
    world = World()
    node = world.others[0]
    ahead = node.prefetch("r", KEYS, WIDTH)
    assert ahead is not None
    node.leave_prefetch(ahead)
    assert node.owes
    world.step()
    world.answer(0)
    assert not node.owes


def relay() -> tuple[Relay, ListChannel]:
    """An agent whose second connection this is."""

    class Unconnected(Relay):
        def start(self) -> None:
            pass

    agent, channel = Unconnected("", None, Register("engine", {}, CHUNK)), ListChannel()
    for _ in range(2):
        connection = DaemonConnection(channel, "own")
        connection.welcome, connection.registration = Welcome(boot=boot(1)), agent.registration
        agent._connected(connection)
    return agent, channel


def test_an_agent_drops_what_was_for_an_older_connection() -> None:
    agent, channel = relay()
    agent.send(ToAgent(1, 1, [Lookup("old", KEYS, WIDTH)]))
    agent.send(ToAgent(2, 2, [Lookup("new", KEYS, WIDTH)]))
    assert [message.request for message in channel.sent] == ["new"]


def test_an_agent_hands_over_before_it_returns_an_answer() -> None:
    agent, channel = relay()
    news = agent.take()
    assert news is not None
    assert (news.epoch, news.welcome) == (2, Welcome(boot=boot(1)))
    channel.answers = [Matched(seq=1, lease=5), Granted(seq=2, grants=[Grant(), Grant(6)])]
    assert agent.take() is not None
    assert channel.sent == [HandedOver(boot=boot(1), leases=(5,), reservations=(6,))]
    assert agent.take() is None


def test_an_agent_that_cannot_hand_over_returns_no_answer() -> None:
    agent, channel = relay()
    channel.answers = [Matched(seq=1, lease=5)]
    channel.fails = True
    news = agent.take()
    assert news is not None
    assert (news.epoch, news.answers) == (0, [])


@pytest.mark.parametrize(("connected", "waits"), [(True, CLOSE_S), (False, 0.0)])
def test_a_step_that_ends_an_agent_waits_for_no_handshake(connected: bool, waits: float) -> None:
    agent, _ = relay()
    waited: list[float] = []
    thread: Any = SimpleNamespace(join=waited.append)
    agent._thread = thread
    if not connected:  # its daemon is stopped, and the thread waits for the welcome
        with agent.lock:
            assert agent.connection is not None
            agent.lose(agent.connection, Unavailable("it is gone"))
    agent.close()
    assert agent.closed
    assert waited == [waits]


# ---------------------------------------------------------------- lost reports


def test_a_lookup_ends_with_the_step_that_lost_its_report(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    world.client.new_step()
    assert world.look_up().match is PENDING
    world.own.answers.append(world.matched(world.own.sent[-1], 5))
    assert world.look_up().match is PENDING
    world.client.outgoing()
    world.client.new_step()
    assert world.client.owes
    world.client.step_ended()  # the first one
    assert world.look_up().match is PENDING
    world.client.step_ended()
    found = world.look_up()
    assert (found.match, found.why) == (None, "no_daemon")
    assert "a step lost what its agent said" in caplog.text
    assert not world.others[0].outgoing(9, 2)[0].messages
    assert [node.owes for node in world.others] == [False]
    world.client.new_step()
    assert world.client.form == 2, "its daemon may have lent what nobody here knows of"


def test_a_step_that_takes_long_is_no_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    (question,) = world.ask(own=5)
    now_s = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now_s() + PATIENT.lookup_budget_ms / 1000)
    assert world.client.lookups._of["r"].give_up_s < time.monotonic()
    world.client.step_ended()
    assert world.look_up().match is PENDING
    world.answer(0, world.matched(question, 5, 1))
    match = world.look_up().match
    assert isinstance(match, Match)
    assert match.chunks == 5


def test_an_agent_whose_report_was_lost_connects_anew() -> None:
    agent, _ = relay()

    def connected() -> bool:
        return agent.connection is not None

    agent.send(ToAgent(step=1))
    first = agent.take()
    assert first is not None
    assert (first.count, first.welcome) == (1, Welcome(boot=boot(1)))
    agent.send(ToAgent(step=2, ended=0, heard=0))
    assert connected(), "the report may still come"
    agent.send(ToAgent(step=3, ended=1, heard=0))
    assert not connected()
    second = agent.take()
    assert second is not None
    assert (second.count, second.epoch) == (2, 0)
    agent.send(ToAgent(step=4, ended=3, heard=2))
    assert agent.take() is None


def test_a_rank_reports_its_daemon_until_the_scheduler_knows_it() -> None:
    """Also before nodes are known: the report of any step may be lost."""
    client: Any = SimpleNamespace(connection=SimpleNamespace(boot=boot(1)), why_absent="no")
    copier: Any = SimpleNamespace(client=client, strategy=ParallelStrategy(tp=2, rank=1))
    rank = NodeRank(copier, Boundary())
    rank._form, rank._moved = 1, client
    rank.own_part(SharedWork())
    assert rank.news() == RankNews(boot(1), 1, None, "no")

    def reports(*known: Any) -> RankNews | None:
        node = NodeWork((0, 1), known=[(boot(0), ""), known])
        rank.own_part(SharedWork(nodes=NodesWork(1, "engine", (node,))))
        return rank.news()

    assert reports(b"", "") == RankNews(boot(1), 1, None, "no")
    assert reports(boot(1, 1), "no") == RankNews(boot(1), 1)
    assert reports(boot(1), "other") == RankNews(b"", 1, None, "no")
    assert reports(boot(1), "no") is None


def test_an_agent_is_told_how_to_register_until_it_has() -> None:
    world = World()
    node, (agent, _) = world.others[0], relay()
    world.tell(0, FromAgent(9, 0, "it was ended"))
    terms = node.registration
    assert terms is not None
    for step in (1, 2):  # what the first one brought may be lost
        to, _ = node.outgoing(step, 0)
        assert to.registration is terms
    agent.send(to)
    assert (agent.connection, agent.registration) == (None, terms)
    connection = DaemonConnection(ListChannel(), "own")
    connection.registration = terms
    agent._connected(connection)
    agent.send(to)
    assert agent.connection is connection, "it has registered so"
    world.connect()
    assert node.outgoing(3, 0)[0].registration is None


def test_what_is_known_of_ranks_is_what_they_reported_last() -> None:
    world = World()
    assert [world.client.reached.known(rank) for rank in (0, 1)] == [(boot(0), ""), (boot(1), "")]
    world.client.reported({1: RankNews(failure="other weights")})
    assert world.client.reached.known(1) == (boot(1), "other weights")
    world.client.reported({1: RankNews(boot(1, 1))})
    assert [world.client.reached.known(rank) for rank in (0, 1)] == [(b"", "")] * 2, "say it again"
    world.all_say(boot(0), boot(1, 1))
    assert world.client.reached.known(1) == (boot(1, 1), "")


def test_what_an_agent_says_after_a_lost_report_does_not_count() -> None:
    """It may be about what nobody here knows of."""
    world = World()
    (question,) = world.ask(own=5)
    node = world.others[0]
    answer = world.matched(question, 5, 1), time.monotonic()
    world.client.reported(
        {
            1: RankNews(
                form=1, agent=FromAgent(node._number, 1, answers=[answer], count=node._heard + 2)
            )
        }
    )
    assert world.look_up().match is PENDING
    world.connect()
    assert world.look_up().match is None


# ---------------------------------------------------------------- clocks


def test_the_scheduler_counts_the_time_that_is_left_from_when_it_asked() -> None:
    world = World()
    before_s = time.monotonic()
    (question,) = world.ask(own=5)
    asked_s = time.monotonic()
    lent = world.matched(question, 5, 1)
    world.answer(0, lent, read_s=lent.given_s + 4)
    match = world.client.take("r") if world.look_up() else None
    assert match is not None
    assert before_s + 56 <= match.deadline_s <= asked_s + 56
    _, part = world.client.lent.to_read(match.lease)
    assert world.client.handed_over([match.lease], [], match.boot)
    assert world.client.lent.to_read(match.lease) == ()
    assert (part.number, part.boot) == (lent.lease, boot(1))
    assert part.deadline_s == pytest.approx(lent.deadline_s, abs=1e-6)
    assert part.given_s == pytest.approx(lent.given_s, abs=1e-6)


# ---------------------------------------------------------------- handing over


def handed(world: World) -> list[HandedOver]:
    return [message for message in world.own.sent if isinstance(message, HandedOver)]


def test_a_node_that_is_lost_between_match_and_hand_over() -> None:
    world = World()
    world.hit(5, 5)
    match = world.client.take("r")
    assert match is not None
    world.tell(0, FromAgent(9, 0, "no daemon"))
    assert not world.client.handed_over([match.lease], [], match.boot)
    assert handed(world) == []
    world.client.release(match.boot, match.lease)
    assert isinstance(world.own.sent[-1], Release)
    assert world.client.lent.matches == {}


def test_a_match_that_is_not_used_is_given_back_on_all_nodes() -> None:
    world = World(3)
    world.hit(5, 5, 5)
    match = world.client.take("r")
    assert match is not None
    world.client.release(match.boot, match.lease)
    released = world.own.sent[-1], *world.step(0)[1], *world.step(1)[1]
    assert [type(one) for one in released] == [Release] * 3
    assert world.client.lent.to_read(match.lease) == ()


def test_a_daemon_that_was_restarted_between_match_and_hand_over() -> None:
    world = World()
    world.hit(5, 5)
    match = world.client.take("r")
    assert match is not None
    world.connect(0, life=1)
    assert not world.client.handed_over([match.lease], [], match.boot)


def test_while_a_node_has_no_daemon_nothing_matches_and_nothing_is_stored() -> None:
    world = World()
    world.tell(0, FromAgent(9, 0, "nobody listens"))
    found = world.look_up()
    assert (found.match, found.why) == (None, "no_daemon")
    assert not world.answers()
    shown = world.client._reset.registration.uncached
    assert shown == "the daemon of ranks 1 of 2: nobody listens"
    world.connect(0, life=1)
    assert world.client._reset.registration.uncached == ""


def test_a_connection_that_is_lost_while_its_daemon_runs_has_the_ranks_register_anew() -> None:
    """It may have lent what nobody here knows of; the end of the ranks' connections ends that."""
    world = World()
    world.tell(0, FromAgent(9, 0, "it was ended"))
    world.connect(0)
    world.client.new_step()
    assert world.client.form == 2


def test_a_daemon_that_was_restarted_does_not() -> None:
    world = World()
    world.tell(0, FromAgent(9, 0, "killed"))
    world.connect(0, life=1)
    world.client.new_step()
    assert world.client.form == 1


# ---------------------------------------------------------------- stores


def reserve(world: World) -> tuple[Any, Reserve, list[Reserve]]:
    reserving = world.client.begin_reserve([ReserveItem("r", KEYS[: 4 * WIDTH])], WIDTH)
    assert reserving is not None
    own = world.own.sent[-1]
    return reserving, own, [world.step(n)[0][-1] for n in range(len(world.others))]


def granted(question: Reserve, node: int, number: int, chunks: Sequence[int]) -> Granted:
    now = time.monotonic() + (FAR_S if node else 0.0)
    grant = Grant(number, tuple(chunks), rows(len(chunks))) if chunks else Grant()
    return Granted(
        seq=question.seq, boot=boot(node), given_s=now, deadline_s=now + 60, grants=[grant]
    )


def test_each_node_stores_what_it_lacks() -> None:
    world = World()
    reserving, own, (other,) = reserve(world)
    world.own.answers.append(granted(own, 0, 7, [2, 3]))
    assert world.client.granted(reserving) is PENDING
    world.answer(0, granted(other, 1, 8, [0, 3]))
    answer = world.client.granted(reserving)
    assert isinstance(answer, Granted)
    (grant,) = answer.grants
    assert grant.chunks == (0, 2, 3)
    assert grant.rows() == ((0, 2, 3),)
    parts = world.client.lent.to_write(grant.reservation)
    assert world.client.handed_over([], [grant.reservation], answer.boot)
    assert handed(world)[0].reservations == (7,)
    assert world.client.lent.to_write(grant.reservation) == ()
    assert [part and (part.number, part.rows) for part in parts] == [
        (7, ((1, 2),)),
        (8, ((0, 2),)),
    ]


def test_a_reserve_that_one_node_refuses_is_given_back_by_the_others() -> None:
    world = World(3)
    reserving, own, (one, other) = reserve(world)
    world.own.answers.append(granted(own, 0, 7, [0]))
    world.answer(0, granted(one, 1, 8, [0]))
    world.answer(1, Error(seq=other.seq, code="not_ready", text="ranks are missing"))
    assert world.client.granted(reserving) is None
    assert [m.reservation for m in world.own.sent if isinstance(m, Abort)] == [7]
    assert world.step(0)[1] == [Abort(boot=boot(1), reservation=8)]


def test_a_grant_that_comes_after_the_reserve_was_given_up_is_given_back() -> None:
    """An abort or a preemption, while a question is under way."""
    world = World()
    reserving, own, (other,) = reserve(world)
    world.own.answers.append(granted(own, 0, 7, [0]))
    assert world.client.granted(reserving) is PENDING
    world.client.give_up(reserving)
    assert [m.reservation for m in world.own.sent if isinstance(m, Abort)] == [7]
    world.answer(0, granted(other, 1, 8, [0]))
    assert world.step()[1] == [Abort(boot=boot(1), reservation=8)]


def test_a_grant_says_that_nodes_were_made_anew_since_the_last_one() -> None:
    """Stores that such a step dropped are offered again, as after the restart of a daemon."""
    world, boots = World(), list[bytes]()
    for _ in range(2):
        reserving, own, (other,) = reserve(world)
        world.own.answers.append(granted(own, 0, 7, [0]))
        world.answer(0, granted(other, 1, 8, [0]))
        answer = world.client.granted(reserving)
        assert isinstance(answer, Granted)
        boots.append(answer.boot)
        world.tell(0, FromAgent(9, 0, "it was ended"))
        world.connect(0)
        world.client.new_step()
        world.connect_own()
        world.step()
        world.connect(0)
    assert world.client.form == 3
    assert boots[0] != boots[1]


# ---------------------------------------------------------------- ahead of use


def test_the_others_promote_what_the_own_daemon_then_has() -> None:
    world = World()
    ahead = world.client.prefetch("r", KEYS, WIDTH, 1, RequestContext(tenant="someone"), 60.0)
    assert ahead is not None
    assert not world.client.prefetched(ahead)
    assert world.step() == ([], []), "perhaps the own daemon lacks it"
    world.own.answers.append(Prefetched(seq=ahead.seq, chunks=5))
    world.client.new_step()
    assert not world.client.prefetched(ahead)
    (other,) = world.step()[0]
    assert (other.digests, other.first, other.tenant) == (KEYS[: 5 * WIDTH], 1, "someone")
    assert not world.client.prefetched(ahead), "a request's turn ends when all nodes have it"
    world.answer(0, Prefetched(seq=other.seq, chunks=5))
    assert world.client.prefetched(ahead)
    world.client.end_prefetch(ahead)
    assert not [m for m in world.step()[0] if m.digests]


@pytest.mark.parametrize("ends", [True, False])
def test_what_the_others_promote_ends_with_its_request(ends: bool) -> None:
    """Also once the own daemon has answered."""
    world = World()
    ahead = world.client.prefetch("r", KEYS, WIDTH, 1)
    assert ahead is not None
    world.own.answers.append(Prefetched(seq=ahead.seq, chunks=5))
    world.client.new_step()
    world.client.prefetched(ahead)
    (begun,) = world.step()[0]
    if ends:
        world.client.end_prefetch(ahead)
    else:
        world.client.leave_prefetch(ahead)
    told = world.step()[0]
    assert [(one.request, one.digests) for one in told] == [(begun.request, b"")] * ends
    world.answer(0, Prefetched(seq=begun.seq, chunks=5))
    assert world.client.prefetched(ahead)


def test_a_node_that_is_gone_promotes_nothing_more() -> None:
    world = World()
    ahead = world.client.prefetch("r", KEYS, WIDTH, 1)
    assert ahead is not None
    world.own.answers.append(Prefetched(seq=ahead.seq, chunks=5))
    world.client.new_step()
    assert not world.client.prefetched(ahead)
    world.client._others = ()
    assert world.client.prefetched(ahead)


@pytest.mark.parametrize("has", [0, 1])
def test_the_others_promote_nothing_that_is_no_hit(has: int) -> None:
    world = World()
    ahead = world.client.prefetch("r", KEYS, WIDTH, 1)
    assert ahead is not None
    world.own.answers.append(Prefetched(seq=ahead.seq, chunks=has))
    world.client.new_step()
    assert world.client.prefetched(ahead)
    assert world.step() == ([], [])


# ---------------------------------------------------------------- clears


def test_nothing_matches_until_every_node_has_confirmed_a_clear() -> None:
    world = World()
    assert not world.client.clear(0.0)
    assert world.client.owes
    world.own.answers.append(Cleared(seq=world.own.sent[-1].seq))
    world.client.new_step()
    assert world.look_up().why == "clearing"
    assert not world.answers()
    (message,) = world.step()[0]
    assert isinstance(message, Clear)
    world.answer(0, Cleared(seq=message.seq))
    world.client.new_step()
    assert world.answers()
    assert world.look_up().match is PENDING


def test_a_node_that_is_found_after_a_clear_is_cleared_first() -> None:
    world = World()
    world.client.clear(0.0)
    world.own.answers.append(Cleared(seq=world.own.sent[-1].seq))
    world.client.nodes = ()
    world.client._others = ()
    world.client.new_step()
    world.connect_own()
    world.client.new_step()
    world.step()
    world.connect()
    world.client.new_step()
    assert [type(message) for message in world.step()[0]] == [Clear]
    assert not world.answers()


def test_nodes_are_not_made_anew_while_one_of_them_has_a_clear_to_confirm() -> None:
    """Else its rows of before would stay, and meet new ones of the other nodes."""
    world = World()
    world.client.clear(0.0)
    world.own.answers.append(Cleared(seq=world.own.sent[-1].seq))
    world.tell(0, FromAgent(9, 0, "it was ended"))
    world.connect()
    for _ in range(3):
        world.client.new_step()
    assert world.client.form == 1
    assert world.look_up().match is None
    (message,) = world.step()[0]
    assert isinstance(message, Clear)
    world.answer(0, Cleared(seq=message.seq))
    world.client.new_step()
    world.client.new_step()
    assert world.client.form == 2


@pytest.mark.parametrize("known", [False, True])
def test_it_is_said_if_no_rank_uses_the_schedulers_daemon(
    caplog: pytest.LogCaptureFixture, known: bool
) -> None:
    world = World()

    def shown() -> str:
        return world.client._reset.registration.uncached

    if not known:
        world.client.nodes = ()
    world.all_say(boot(7), boot(7))
    for _ in range(APART_STEPS):
        world.run_steps(1)
        assert not caplog.text
    world.run_steps(1)
    assert shown() == "no rank uses the daemon of the scheduler"
    world.client.reported({0: RankNews(boot(0))})
    world.client.new_step()
    assert shown() == ""
    assert "no rank uses the daemon of the scheduler" in caplog.text


def test_it_is_said_which_ranks_have_reported_no_daemon(caplog: pytest.LogCaptureFixture) -> None:
    """One has none, and another one knows nothing of several machines."""
    world = World(3)
    world.client.reached, world.client.nodes = Reached(3), ()

    def shown() -> str:
        return world.client._reset.registration.uncached

    world.client.reported({0: RankNews(boot(0)), 1: RankNews(failure="no daemon there")})
    assert shown() == "rank 1: no daemon there"
    world.run_steps(APART_STEPS)
    assert shown() == "rank 1: no daemon there"
    world.run_steps(1)
    silent = "rank 2: it has not reported which daemon it reaches"
    assert shown() == f"rank 1: no daemon there; {silent}"
    assert silent in caplog.text
    world.client.reported({1: RankNews(boot(1))})
    assert shown() == silent
    world.all_say(boot(0), boot(1), boot(2))
    world.run_steps(1)
    assert shown() == ""
    assert len(world.client.nodes) == 3


def test_a_rank_that_never_had_a_daemon_says_why(tmp_path: Path) -> None:
    terms = ParallelStrategy(tp=2, rank=1).register("engine", {}, CHUNK, layout(1))
    client = WorkerClient(str(tmp_path / "kvass.sock"), terms)
    rank = NodeRank(SimpleNamespace(client=client), Boundary())  # type: ignore[arg-type]
    assert rank.news() is None
    with pytest.raises(Unavailable) as failed:
        client.connect(5)
    news = rank.news()
    assert news is not None
    assert news.failure == str(failed.value)
    client.counters["connects"] = 1
    assert rank.news() is None, "its node lost its daemon, which others say"
    client.close()


def test_all_nodes_move_to_one_generation() -> None:
    world = World()
    world.client.new_generation()
    own = next(m for m in reversed(world.own.sent) if isinstance(m, Register))
    (other,) = world.step()[0]
    assert own.generation == other.generation != b""
