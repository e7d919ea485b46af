"""Tiers in processes of their own: what the daemon and they say, and how such a process ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from kvass.arena import memory
from kvass.core.effects import (
    Emptied,
    EpochIs,
    FromTier,
    Loaded,
    Probed,
    Stored,
    TierClear,
    TierEpoch,
    TierReport,
    ToTier,
)
from kvass.daemon.tier_process import frames, server
from kvass.daemon.tier_process.child import spawn
from kvass.daemon.tier_process.health import HealthState
from kvass.daemon.tier_process.supervisor import MAX_OPEN_REQUESTS, Periods, TierProcess
from kvass.errors import ConfigError, FrameError
from kvass.messages import Commit
from kvass.testing.daemon import running_daemon
from tests.daemon.tier_rig import PAGE, commit_two, disk, load, probe, store, tier_of
from tests.support.tiers.faulty import url
from tests.support.waiting import eventually
from tests.support.wire.raw_session import engine

WAIT_S = 30.0
SILENT_S = 0.05
"""Between heartbeats in tests of silence, which run alone: a busy machine is silent, too."""


class Shell:
    """A loop and one tier's process, and what it posted.

    ``periods``: of ``Periods``. Unless they say otherwise no process is silent for too long, and
    another one is started soon.
    """

    def __init__(self, url: str, **periods: Any) -> None:
        soon = {"heartbeat_s": 3600.0, "first_pause_s": 0.1, "longest_pause_s": 0.1}
        ends = {"device_s": 0.0, "close_s": 0.2, "end_s": WAIT_S}
        self.periods = Periods(**{**soon, **ends, **periods})
        self.arena = memory.create(64 * PAGE)
        self.ends: list[FromTier] = []
        self.report: dict[str, Any] = {}
        self.loop = asyncio.new_event_loop()
        where = self.arena.fileno(), self.arena.size
        self.tier = TierProcess(0, url, "one", *where, self.periods)
        try:
            self.loop.run_until_complete(self.tier.open(self._take))
        except ConfigError:
            self.close()
            raise

    def _take(self, event: FromTier | TierReport) -> None:
        if isinstance(event, TierReport):
            self.report = event.fields
        else:
            self.ends.append(event)

    def submit(self, *effects: ToTier) -> None:
        for effect in effects:
            self.tier.submit(effect)

    def until(self, what: Any) -> bool:
        """Let the loop run until ``what()``; False: it took too long."""
        deadline = time.monotonic() + WAIT_S
        while not what():
            if time.monotonic() > deadline:
                return False
            self.loop.run_until_complete(asyncio.sleep(0.005))
        return True

    def end(self, *effects: ToTier) -> Any:
        """Ask, and the one answer to the last."""
        self.submit(*effects)
        op = effects[-1].op
        assert self.until(lambda: any(end.op == op for end in self.ends)), self.report
        (found,) = [end for end in self.ends if end.op == op]
        return found

    @property
    def pid(self) -> int:
        assert self.until(lambda: "pid" in self.report and self.report["up"])
        return int(self.report["pid"])

    def close(self) -> None:
        self.loop.run_until_complete(self.tier.close())
        self.loop.close()
        self.arena.close()


@contextmanager
def shell(url: str, **periods: Any) -> Iterator[Shell]:
    made = Shell(url, **periods)
    try:
        yield made
    finally:
        made.close()
    assert len({end.op for end in made.ends}) == len(made.ends), "an operation ended twice"


# ---------------------------------------------------------------- frames


@pytest.mark.parametrize(
    "said",
    [
        frames.Start(3, "disk:/x?capacity=1GiB", "disk:/x", 1 << 40, 2.0),
        frames.Heartbeat("info"),
        probe(5, 1, 2, 3),
        load(6, 1, 1),
        store(2**60, 1, 1),
        TierEpoch(0, 7, bytes(32), 2**64 - 1, renew=True),
        TierClear(1, 8),
        frames.TierOpened(),
        frames.TierOpened("no such folder"),
        Probed(1, np.array([True, False])),
        Loaded(2, np.array([True])),
        Stored(3, np.zeros(0, np.bool_), down=True),
        EpochIs(4, None),
        EpochIs(4, 2**64 - 1),
        Emptied(5, True),
        TierReport(1, {"up": True, "records": 5, "trouble": "", "rate": 0.5}),
    ],
)
def test_what_one_says_arrives_at_the_other(said: Any) -> None:
    hear = frames.from_daemon if isinstance(said, frames.ToProcess) else frames.from_process
    (got,) = hear().feed(frames.encode(said))
    assert repr(got) == repr(said)


@pytest.mark.parametrize(
    "raw",
    [
        frames.encode(frames.Start(0, "", "", 0, 0.0)),  # the other direction's
        b"\x03\0\0\0abc",
        b"\xff\xff\xff\xff",
        frames.encode(Probed(1, np.array([True]))).replace(
            b"\x01\xc4\x01\x01", b"\x02\xc4\x01\x01"
        ),
    ],
)
def test_what_is_no_message_is_a_frame_error(raw: bytes) -> None:
    with pytest.raises(FrameError):
        list(frames.from_process().feed(raw))


# ---------------------------------------------------------------- a process that serves


def test_bytes_go_through_the_arena(folder: Path) -> None:
    with shell(url(folder)) as one:
        one.arena.buffer[PAGE : 2 * PAGE] = 1
        one.arena.buffer[33 * PAGE : 34 * PAGE] = 2
        assert one.end(store(1, 9, 1)).which.all()
        assert one.end(load(2, 9, 5)).which.all()
        assert (one.arena.buffer[5 * PAGE : 6 * PAGE] == 1).all()
        assert (one.arena.buffer[37 * PAGE : 38 * PAGE] == 2).all()
        assert one.end(probe(3, 9, 10)).held.tolist() == [True, False]
        assert one.pid != os.getpid()
    assert (folder / "closed").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(one.pid, 0)


def test_ten_thousand_questions_at_once(folder: Path) -> None:
    """More than a socket holds, in both directions; what is over the bound fails."""
    with shell(url(folder)) as one:
        one.end(store(0, 5, 1))
        one.submit(*(probe(op, *range(20)) for op in range(1, 10_001)))
        assert one.until(lambda: len(one.ends) == 10_001)
        asked = [end.held.any() for end in one.ends if isinstance(end, Probed)]
        assert 0 < sum(asked) <= MAX_OPEN_REQUESTS
        assert one.end(probe(20_000, 5)).held.all()


def test_signals_meant_for_the_daemon_are_the_daemons(folder: Path) -> None:
    with shell(url(folder)) as one:
        os.kill(one.pid, signal.SIGTERM)
        os.kill(one.pid, signal.SIGINT)
        assert one.end(store(1, 9, 1)).which.all()
        assert one.report["restarts"] == 0


def test_what_cannot_be_opened_is_said_in_one_line(folder: Path) -> None:
    (folder / "shut").touch()
    with pytest.raises(ConfigError, match=r"^tier one: shut$"):
        Shell(url(folder))
    with pytest.raises(ConfigError, match="unknown scheme"):
        Shell("floppy:/x")


# ---------------------------------------------------------------- a process that ends


@pytest.mark.parametrize(("how", "count"), [("crash", 1), ("kill", 2)])
def test_what_it_was_asked_fails_and_another_serves(
    folder: Path, how: str, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    with shell(url(folder)) as one:
        first = one.pid
        (folder / "hold-load").touch()
        one.submit(*[load(1, 9, 1), load(2, 9, 2)][:count])  # one that crashes lets others answer
        assert one.until((folder / "in-load").exists)
        if how == "crash":
            (folder / "crash-load").touch()
            (folder / "hold-load").unlink()
        else:
            os.kill(first, signal.SIGKILL)
        assert one.until(lambda: len(one.ends) == count)
        assert [end.which.any() for end in one.ends if isinstance(end, Loaded)] == [False] * count
        (folder / "hold-load").unlink(missing_ok=True)
        assert not one.end(probe(3, 9)).held.any(), "nobody serves: a miss at once"
        assert one.until(lambda: one.report.get("pid") != first and one.report["up"])
        assert one.report["restarts"] == 1
        assert one.end(store(4, 9, 1)).which.all()
        assert one.end(load(5, 9, 5)).which.all()
    name = {"crash": "SIGSEGV", "kill": "SIGKILL"}[how]
    assert f"its process was ended by {name}; {count} operations failed" in caplog.text
    assert "it has a process again" in caplog.text


def test_nothing_ends_before_the_process_is_dead(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may write to its slots until then (law 3), though it hung up."""
    with shell(url(folder)) as one:
        (folder / "hold-load").touch()
        one.submit(load(1, 9, 1))
        assert one.until((folder / "in-load").exists)
        dead = False
        assert one.tier._process is not None
        really = one.tier._process.poll
        monkeypatch.setattr(one.tier._process, "poll", lambda: really() if dead else None)
        os.kill(one.pid, signal.SIGKILL)
        assert one.until(lambda: one.tier._health.state is HealthState.DOWN)
        one.loop.run_until_complete(asyncio.sleep(0.2))
        assert not one.ends
        dead = True
        assert one.until(lambda: bool(one.ends))


@pytest.mark.alone
def test_one_of_which_no_thread_runs_is_killed(folder: Path) -> None:
    with shell(url(folder), heartbeat_s=SILENT_S, kill_after=100_000) as one:
        first = one.pid
        os.kill(first, signal.SIGSTOP)
        one.periods.kill_after = 10
        assert not one.end(load(1, 9, 1)).which.any()
        one.periods.heartbeat_s = 3600.0  # the next one may take its time
        assert one.until(lambda: one.report.get("restarts") == 1)
        assert one.pid != first


@pytest.mark.alone
def test_one_that_does_not_answer_is_asked_no_more_until_it_does(folder: Path) -> None:
    """Questions end at once; what may write to slots is waited for (law 3)."""
    with shell(url(folder), heartbeat_s=SILENT_S, kill_after=100_000) as one:
        one.end(store(0, 9, 1))
        os.kill(one.pid, signal.SIGSTOP)
        one.submit(load(1, 9, 5), store(2, 8, 1))
        assert not one.end(probe(3, 9)).held.any()
        assert not one.report["up"]
        assert not one.end(load(4, 9, 6)).which.any()
        assert {end.op for end in one.ends} == {0, 3, 4}
        assert one.tier._process is not None
        os.kill(one.tier._process.pid, signal.SIGCONT)
        assert one.until(lambda: one.report["up"])
        assert one.until(lambda: {end.op for end in one.ends} == {0, 1, 2, 3, 4})
        assert one.end(probe(5, 9, 8)).held.all()
    assert one.report["restarts"] == 0


def test_after_its_death_slots_rest_for_the_grace(folder: Path) -> None:
    """What a device was told to write may still come."""
    with shell(url(folder), device_s=1.0) as one:
        (folder / "hold-load").touch()
        (folder / "hold-store").touch()
        one.submit(load(1, 9, 1), store(2, 9, 2))
        assert one.until((folder / "in-load").exists)
        began = time.monotonic()
        os.kill(one.pid, signal.SIGKILL)
        assert one.until(lambda: len(one.ends) == 2)
        assert time.monotonic() - began >= 1.0
        assert [end.op for end in one.ends] == [2, 1], "the store at once"
        (folder / "hold-load").unlink()
        (folder / "hold-store").unlink()


def test_what_it_has_forked_neither_speaks_for_it_nor_has_the_arena(folder: Path) -> None:
    with shell(url(folder)) as one:
        one.end(store(0, 9, 1))
        (folder / "fork-load").touch()
        one.submit(load(1, 9, 5))
        assert one.until((folder / "forked").exists)
        child = int((folder / "forked").read_text())
        os.kill(one.pid, signal.SIGKILL)
        assert one.until(lambda: len(one.ends) == 2)
        assert one.until(lambda: ended(child)), "it outlives nobody"
        time.sleep(0.2)
        assert not one.arena.buffer[5 * PAGE : 6 * PAGE].any()


def test_one_that_does_not_open_at_first_is_refused(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "hold-open").touch()
    with pytest.raises(ConfigError, match="tier one: not open after 1 s"):
        Shell(url(folder), open_s=1.0, open_warning_s=0.4, end_s=0.1)
    assert "tier one: still opening" in caplog.text


def test_one_that_ends_while_it_opens_is_refused(folder: Path) -> None:
    (folder / "exit-open").touch()
    with pytest.raises(ConfigError, match="tier one: its process ended with status 3; see above"):
        Shell(url(folder))


def test_a_daemon_that_leaves_while_it_starts_leaves_no_traceback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, closing(memory.create(PAGE)) as arena:
        process = spawn(theirs.fileno(), arena.fileno(), "disk:gone")
    assert process.wait(30) == 0
    assert capfd.readouterr().err == ""


def test_messages_are_received_into_one_buffer() -> None:
    """With a new one for each read, the heap of a tier's process grew by 5 MiB in ten minutes."""
    ours, theirs = socket.socketpair()
    beat = frames.encode(frames.Heartbeat("info"))
    with ours, theirs:
        received = server._received(theirs)
        ours.sendall(beat)
        assert next(received) == frames.Heartbeat("info")
        ours.sendall(beat)
        tracemalloc.start()
        try:
            next(received)
            assert tracemalloc.get_traced_memory()[1] < server._READ_BYTES // 4
        finally:
            tracemalloc.stop()


def test_a_call_that_hangs_keeps_no_process_from_leaving(folder: Path) -> None:
    with shell(url(folder)) as one:
        (folder / "hold-load").touch()
        one.submit(load(1, 9, 1))
        assert one.until((folder / "in-load").exists)
    assert one.tier._process is not None
    assert one.tier._process.returncode == 0, "it ended by itself"
    assert not (folder / "closed").exists()


def test_secrets_in_the_environment_stay_with_the_daemon(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVASS_TIER", "redis:h?password=hunter2")
    with shell(url(folder)) as one:
        for what in ("environ", "cmdline"):
            said = Path(f"/proc/{one.pid}/{what}").read_bytes()
            assert b"hunter2" not in said
        assert b"one" in said, "ps tells which tier it is"


@pytest.mark.parametrize(
    ("file", "trouble"),
    [("shut", "shut"), ("hold-open", "not open after 0.2 s; is its store well?")],
)
def test_one_that_cannot_be_opened_again_is_tried_again(
    file: str, trouble: str, folder: Path
) -> None:
    with shell(url(folder)) as one:
        (folder / file).touch()
        one.periods.open_s = 0.2 if file == "hold-open" else WAIT_S
        one.periods.open_warning_s = 0.2
        os.kill(one.pid, signal.SIGKILL)
        assert one.until(lambda: one.report.get("trouble") == trouble)
        assert not one.report["up"]
        assert one.end(store(1, 9, 1)).down
        (folder / file).unlink()
        one.periods.open_s = WAIT_S
        assert one.until(lambda: one.report["up"])
        assert one.end(store(2, 9, 1)).which.all()


def test_an_error_of_ours_reaches_the_loop(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon ends there (``Server``)."""
    seen: list[dict[str, Any]] = []
    with shell(url(folder)) as one:
        one.loop.set_exception_handler(lambda _, context: seen.append(context))
        error = AssertionError("broken on purpose")
        monkeypatch.setattr(one.tier._health, "failed", Mock(side_effect=error))
        os.kill(one.pid, signal.SIGKILL)
        assert one.until(lambda: bool(seen))
    assert seen[0]["exception"] is error


# ---------------------------------------------------------------- under a daemon


SOON = (
    "-c",
    "import sys\n"
    "from kvass.cli.main import main\n"
    "from kvass.daemon.tier_process import supervisor as s\n"
    "soon = s.Periods(heartbeat_s=0.2, kill_after=300, first_pause_s=0.1, close_s=0.2)\n"
    "s.Periods = lambda: soon\n"
    "sys.exit(main())",
)
"""A daemon that gives processes up sooner than by default, and starts another one sooner."""


def ended(pid: int) -> bool:
    """Whether it is dead, reaped (here by whoever reaps orphans) or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_daemon_outlives_its_tiers_process(tmp_path: Path, folder: Path) -> None:
    with (
        running_daemon(tmp_path, program=SOON, tier=[url(folder)]) as daemon,
        engine(daemon.socket) as peers,
    ):
        commit_two(*peers)
        assert eventually(lambda: tier_of(daemon).get("kept") == 2)
        (folder / "crash-store").touch()
        pid = tier_of(daemon)["pid"]
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: tier_of(daemon).get("restarts") == 1)
        assert daemon.running
        assert daemon.status()["rows"] == 2
        assert eventually(lambda: tier_of(daemon)["up"] is True)
        granted = peers[0].reserve("cd")
        peers[1].channel.send(Commit(boot=granted.boot, reservation=granted.grants[0].reservation))
        assert eventually(lambda: tier_of(daemon)["kept"] == 2), "it serves again"
        assert daemon.stop() == 0


def test_a_stopped_tier_keeps_nobody_from_the_next_one(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "disk").mkdir()
    tiers = [url(folder), disk(tmp_path / "disk")]
    with running_daemon(tmp_path, program=SOON, tier=tiers, lookup_budget_ms=2000) as daemon:
        with engine(daemon.socket) as peers:
            commit_two(*peers)
            assert eventually(lambda: tier_of(daemon, 1).get("records") == 2)
        daemon.restart()
        with engine(daemon.socket) as (scheduler, _):
            assert eventually(lambda: tier_of(daemon, 1).get("records") == 2)
            assert eventually(lambda: "pid" in tier_of(daemon))
            os.kill(tier_of(daemon)["pid"], signal.SIGSTOP)
            assert eventually(lambda: tier_of(daemon)["up"] is False)
            assert eventually(lambda: scheduler.lookup("ab").chunks == 2)
            assert tier_of(daemon)["restarts"] == 0, "not because it was killed"


def test_no_tier_outlives_its_daemon(tmp_path: Path, folder: Path) -> None:
    """Its folder can be had again at once, however busy it was."""
    (tmp_path / "disk").mkdir()
    tiers = [disk(tmp_path / "disk"), url(folder)]
    with running_daemon(tmp_path, tier=tiers) as daemon, engine(daemon.socket) as peers:
        (folder / "hold-store").touch()
        commit_two(*peers)
        assert eventually((folder / "in-store").exists)
        assert eventually(lambda: tier_of(daemon).get("records") == 2)
        pid = tier_of(daemon, 1)["pid"]
        daemon.restart()
        assert ended(pid)
        assert eventually(lambda: tier_of(daemon).get("records") == 2)
        (folder / "hold-store").unlink()


def test_a_tiers_process_holds_no_session_open(tmp_path: Path, folder: Path) -> None:
    """It has inherited no descriptor but its own: EOF is the proof of death (law 3)."""
    with (
        running_daemon(tmp_path, program=SOON, tier=[url(folder), url(folder)]) as daemon,
        engine(daemon.socket),
    ):
        assert eventually(lambda: "pid" in tier_of(daemon, 1))
        os.kill(tier_of(daemon, 1)["pid"], signal.SIGKILL)  # the next starts beside sessions
        assert eventually(lambda: tier_of(daemon, 1).get("restarts") == 1)
        fds = Path(f"/proc/{tier_of(daemon, 1)['pid']}/fd")
        links = [os.readlink(fd) for fd in fds.iterdir()]
        assert sum(link.startswith("socket:") for link in links) == 1, links
        assert not any("kvass.sock" in link for link in links)
