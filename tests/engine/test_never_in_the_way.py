"""Never in the way: whatever becomes of the daemon, requests end with the right tokens, in time.

One engine, started before there was any daemon, lives through all of it. The signals are sent by
the engine's own process at an exact point: just before or after a hook of the connector, or some
time later, while a lookup waits or a (slowed down) copy runs.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from kvass.testing.daemon import Daemon, running_daemon
from tests.engine.conftest import Starter, store
from tests.support.vllm.judge import Judge
from tests.support.vllm.process import Answer, EngineProcess
from tests.support.vllm.ranks import until

pytestmark = [pytest.mark.engine, pytest.mark.alone]

Make = Callable[[int], list[int]]

BOUND_S: Final = 0.25
"""No hook keeps the engine longer, and no request is told ``None`` longer in all."""
HITS_AGAIN_S: Final = 2.0
TRIES: Final = 20
"""More than fit into ``HITS_AGAIN_S``. On a busy machine a store or a lookup may be given up."""
ASK, ALLOCATED, PLAN, LOAD, STORE, RESULT = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "bind_connector_metadata",
    "wait_for_save",
    "get_transfer_results",
)


class Blow(NamedTuple):
    """What happens to the daemon: ``signals`` are (signal, seconds later)."""

    name: str
    hook: str
    when: str
    signals: tuple[tuple[signal.Signals, float], ...]
    matched: int = 0
    """Tokens the connector had promised by then; they are computed instead if they do not come."""
    slow: bool = False
    """It falls between two others, which are enough for a run of all tests."""


KILL = ((signal.SIGKILL, 0.0),)
KILL_LATER = ((signal.SIGKILL, 0.05),)
STOP = ((signal.SIGSTOP, 0.0),)
STOP_LATER = ((signal.SIGSTOP, 0.05),)
FREEZE_THEN_KILL = ((signal.SIGSTOP, 0.0), (signal.SIGKILL, 0.03))

LOADING: Final = (
    Blow("killed before the lookup", ASK, "before", KILL, slow=True),
    Blow("killed during the lookup", ASK, "before", FREEZE_THEN_KILL),
    Blow("killed after the lookup", ASK, "after", KILL, 512, slow=True),
    Blow("killed before the load", LOAD, "before", KILL, 512, slow=True),
    Blow("killed during the load", LOAD, "after", KILL_LATER, 512),
    Blow("stopped before the lookup", ASK, "before", STOP),
    Blow("stopped before the load", LOAD, "before", STOP, 512, slow=True),
    Blow("stopped during the load", LOAD, "after", STOP_LATER, 512),
)
INSIDE: Final = (
    Blow("killed after the match", ALLOCATED, "after", KILL, 512),
    Blow("stopped after the match", ASK, "after", STOP, 512),
    Blow("killed before the copy", LOAD, "before", KILL, 512, slow=True),
    Blow("stopped before the copy", LOAD, "before", STOP, 512, slow=True),
)
"""Of loads inside a step, between the match and the copy."""
STORING: Final = (
    Blow("killed before the reserve", PLAN, "before", KILL, slow=True),
    Blow("killed during the reserve", PLAN, "before", FREEZE_THEN_KILL),
    Blow("killed after the reserve", PLAN, "after", KILL, slow=True),
    Blow("killed during the store", STORE, "after", KILL_LATER),
    Blow("killed after the store", RESULT, "after", KILL),
    Blow("stopped before the reserve", PLAN, "before", STOP, slow=True),
    Blow("stopped after the reserve", PLAN, "after", STOP),
    Blow("stopped during the store", STORE, "after", STOP_LATER),
)


def marked(blows: tuple[Blow, ...]) -> list[Any]:
    return [pytest.param(one, marks=pytest.mark.slow if one.slow else ()) for one in blows]


@pytest.fixture(scope="module")
def place(folder: Path) -> Path:
    """Where there will be a daemon."""
    made = folder / "later"
    made.mkdir()
    return made


@pytest.fixture(scope="module")
def lonely(start: Starter, place: Path) -> Iterator[EngineProcess]:
    """An engine whose daemon is not there yet."""
    engine = start(place.name, socket=place / "kvass.sock", patient=False)
    yield engine.wait_ready()
    engine.kill()


@pytest.fixture(scope="module")
def later(lonely: EngineProcess, place: Path) -> Iterator[Daemon]:
    """That daemon."""
    with running_daemon(place, l1_size="64MiB") as one:
        yield one


@pytest.fixture
def daemon(later: Daemon) -> Iterator[Daemon]:
    """That daemon; a test that fails leaves it to the next one as it was."""
    yield later
    if fell(later):
        recover(later)


@pytest.fixture
def engine(lonely: EngineProcess) -> EngineProcess:
    assert lonely.reset()
    lonely.reset_hooks()
    return lonely


def hits(engine: EngineProcess, make: Make, within_s: float) -> bool:
    """Whether a prompt stored now is found again, trying for so long, and so often."""
    end_s, tries = time.monotonic() + within_s, 0
    while time.monotonic() < end_s or tries < TRIES:
        tries += 1
        tokens = make(300)
        engine.one(tokens, 1)
        assert engine.reset()
        if engine.one(tokens, 1).external:
            return True
    return False


def check_bounds(engine: EngineProcess) -> None:
    measured = engine.hooks()
    assert measured.longest <= BOUND_S, measured.longest_s
    assert measured.told_none_s <= BOUND_S


def recover(daemon: Daemon) -> None:
    """Whatever the blow was: a daemon that runs, in a new life."""
    daemon.kill()
    daemon.start()


def fell(daemon: Daemon) -> bool:
    """Whether the process is gone, or suspended."""
    if not daemon.running:
        return True
    return Path(f"/proc/{daemon.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_absent_at_start(engine: EngineProcess, judge: Judge, prompt: Make) -> None:
    tokens = prompt(520)
    for _ in range(2):
        answer = engine.one(tokens)
        assert answer.external == 0
        judge.check(tokens, answer)
        assert engine.reset()
    check_bounds(engine)
    assert engine.hooks().told_none == 0


def test_no_layer_calls_a_hook_of_its_own(engine: EngineProcess, prompt: Make) -> None:
    """A model of 80 layers would call 160 in each step."""
    engine.one(prompt(100), 3)
    calls = engine.hooks().calls
    assert calls["wait_for_save"] >= 3
    assert not calls.get("wait_for_layer_load", 0)
    assert not calls.get("save_kv_layer", 0)


def test_a_daemon_that_comes_later_is_found(
    engine: EngineProcess, later: Daemon, judge: Judge, prompt: Make
) -> None:
    assert hits(engine, prompt, HITS_AGAIN_S)
    check_bounds(engine)


@pytest.mark.parametrize("blow", marked(LOADING), ids=lambda blow: blow.name.replace(" ", "-"))
def test_while_loading(
    engine: EngineProcess, daemon: Daemon, judge: Judge, prompt: Make, blow: Blow
) -> None:
    for _ in range(TRIES):
        tokens = prompt(520)
        assert hits(engine, prompt, HITS_AGAIN_S)
        store(engine, tokens)
        engine.reset_hooks()
        answer = strike(engine, daemon, judge, blow, tokens)
        recover(daemon)
        if answer.external == blow.matched:
            break
        assert answer.external == 0, "on a busy machine the lookup was given up before the blow"
    assert answer.external == blow.matched
    assert hits(engine, prompt, HITS_AGAIN_S)


@pytest.fixture
def inside(engine: EngineProcess) -> Iterator[EngineProcess]:
    """The engine, which loads all hits inside steps."""
    engine.load_in_steps(at_most=0)
    yield engine
    engine.load_in_steps(False)


@pytest.mark.parametrize("blow", marked(INSIDE), ids=lambda blow: blow.name.replace(" ", "-"))
def test_between_the_match_and_the_copy_inside_its_step(
    inside: EngineProcess, daemon: Daemon, judge: Judge, prompt: Make, blow: Blow
) -> None:
    """The bytes are mapped, and nothing is awaited: a stopped daemon changes nothing. If its rank
    knows that the daemon is dead, the load fails, and what was computed with it is taken back."""
    for _ in range(TRIES):
        tokens = prompt(520)
        assert hits(inside, prompt, HITS_AGAIN_S)
        store(inside, tokens)
        inside.scrub()
        inside.reset_hooks()
        (before,) = inside.in_step()
        answer = strike(inside, daemon, judge, blow, tokens)
        (after,) = inside.in_step()
        recover(daemon)
        if answer.external == blow.matched:
            break
        assert answer.external == 0, "on a busy machine the lookup was given up before the blow"
    assert answer.external == blow.matched
    if STOP[0] in blow.signals:
        assert after > before, "the load ended well"
    assert hits(inside, prompt, HITS_AGAIN_S)


@pytest.mark.parametrize("blow", marked(STORING), ids=lambda blow: blow.name.replace(" ", "-"))
def test_while_storing(
    engine: EngineProcess, daemon: Daemon, judge: Judge, prompt: Make, blow: Blow
) -> None:
    assert hits(engine, prompt, HITS_AGAIN_S)
    engine.reset_hooks()
    strike(engine, daemon, judge, blow, prompt(520))
    recover(daemon)
    assert hits(engine, prompt, HITS_AGAIN_S)


def strike(
    engine: EngineProcess, daemon: Daemon, judge: Judge, blow: Blow, tokens: list[int]
) -> Answer:
    """Run ``tokens`` while the blow falls: the right tokens, in time; and once more after it."""
    engine.slow_copies(0.1)
    engine.arm(blow.hook, blow.when, [(daemon.pid, number, s) for number, s in blow.signals])
    answer = engine.one(tokens)
    until(lambda: fell(daemon), "the blow")
    check_bounds(engine)
    engine.slow_copies(0.0)
    judge.check(tokens, answer, alike=False)  # a load that failed is computed
    assert engine.reset(), "a block is still held"
    judge.check(tokens, engine.one(tokens), alike=False)
    check_bounds(engine)
    return answer


def test_restarted_at_once(
    engine: EngineProcess, daemon: Daemon, judge: Judge, prompt: Make
) -> None:
    tokens = prompt(520)
    store(engine, tokens)
    daemon.restart()
    judge.check(tokens, engine.one(tokens))
    assert hits(engine, prompt, HITS_AGAIN_S)
    check_bounds(engine)


def test_suspended_and_resumed(
    engine: EngineProcess, daemon: Daemon, judge: Judge, prompt: Make
) -> None:
    """It takes up again where it was: same boot, and what was stored before still hits."""
    for _ in range(TRIES):
        tokens = prompt(520)
        store(engine, tokens)
        daemon.suspend()
        frozen = engine.one(tokens)
        assert frozen.external == 0
        judge.check(tokens, frozen)
        assert engine.reset()
        daemon.resume()
        assert hits(engine, prompt, HITS_AGAIN_S)
        assert engine.reset()
        warm = engine.one(tokens)
        judge.check(tokens, warm)
        check_bounds(engine)
        if warm.external:
            break
    assert warm.external == 512
    daemon.wait_until(leases=0, reservations=0, pins=0, quarantined_bytes=0)
