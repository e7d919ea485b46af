"""``kvass serve --arena``: what one daemon has cached, the next one on the machine has."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.rows import Rows
from kvass.cli.bench.rig import WIDTH
from kvass.cli.main import main
from kvass.client.parallel import ParallelStrategy
from kvass.core.saved.index_file import SavedIndex
from kvass.daemon.peer_process import former_process, former_processes
from kvass.errors import Unavailable
from kvass.processes import start_time
from kvass.testing.daemon import ENDS_S, KVASS, Daemon, running_daemon
from kvass.testing.fake_engine import PATIENCE_S, FakeEngine, spread
from kvass.testing.pages import WrongPageError
from kvass.types import GroupLayout, RankLayout
from tests.core.lives import Memory
from tests.daemon.test_process import refused, serve

ROW = 64 << 10
KEYS = [os.urandom(WIDTH) for _ in range(12)]
WORLD = ParallelStrategy(tp=2, pp=1)
MODEL = RankLayout((GroupLayout("full", 16, ("a", "b"), (4096, 4096)),))


@pytest.fixture
def place(memory_folder: Path) -> Path:
    return memory_folder / "kvass"


def found(rows: Rows) -> int:
    """How many of ``KEYS`` are there, each as it was stored."""
    matched = rows.find(KEYS)
    assert not matched.chunks or rows.holds(matched, KEYS[: matched.chunks])
    return matched.chunks


def of_arena(daemon: Daemon) -> dict[str, Any]:
    fields: dict[str, Any] = daemon.status()["arena"]
    return fields


def test_rows_outlive_a_killed_daemon_and_the_engine_that_stored_them(
    tmp_path: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_daemon(tmp_path, arena=str(place)) as daemon:
        with ExitStack() as ending:
            Rows(daemon.socket, "mine", ROW, ending).store(KEYS)
        assert of_arena(daemon)["started_empty"] == "it is new"
        daemon.restart()
        assert " adopted=12 " in daemon.ready
        fields = of_arena(daemon)
        assert (fields["place"], fields["started_empty"]) == (str(place), "")
        assert (fields["adopted_rows"], fields["adopted_bytes"]) == (12, 12 * ROW)
        assert main(["status", "--socket", daemon.socket]) == 0
        assert f"arena    {place}: adopted 12 rows" in capsys.readouterr().out
        with ExitStack() as ending:
            assert found(Rows(daemon.socket, "mine", ROW, ending)) == 12
            assert found(Rows(daemon.socket, "another", ROW, ending)) == 0, "the control"


def test_a_place_that_cannot_be_used_is_a_problem_of_the_daemon(
    tmp_path: Path, place: Path
) -> None:
    """It serves, and its next life will have nothing."""
    script = (
        "import sys; from kvass.arena.place import Place; Place.allocate = lambda *_: False; "
        "from kvass.cli.main import main; sys.exit(main())"
    )
    with running_daemon(tmp_path, arena=str(place), program=("-c", script)) as daemon:
        (problem,) = daemon.status()["problems"]
        assert problem.startswith(f"arena {place}: not used: ")
        assert problem.endswith("; L1 ends with this daemon")
        assert problem in daemon.log()
        assert main(["status", "--check", "--socket", daemon.socket]) == 1


def test_a_full_l1_takes_stores_at_once_after_a_stop_and_a_kill(
    tmp_path: Path, place: Path
) -> None:
    with (
        running_daemon(tmp_path, "4MiB", arena=str(place)) as daemon,
        FakeEngine(daemon.socket, WORLD, spread(WORLD, MODEL)) as engine,
    ):
        for number, end in enumerate((daemon.stop, daemon.kill)):
            prompts = (range(n * 1000, n * 1000 + 64) for n in range(1000 * number, 2000))
            while not daemon.status()["counters"]["bytes_evicted_capacity"]:
                assert engine.store(next(prompts)) == 4
            last = next(prompts)
            assert (engine.store(last), engine.load(last)) == (4, 4)
            daemon.wait_until(leases=0, reservations=0)
            end()
            index = SavedIndex(np.fromfile(place / "index", np.uint8), lambda *_: True)
            said = index.lease_until <= time.monotonic()
            assert said == (end == daemon.stop), "only a stop can say that no lease is open"
            daemon.start()
            assert daemon.status()["l1_resting_bytes"] == 0
            engine.wait_connected()
            assert engine.store(next(prompts)) == 4
            assert engine.load(last) == 4
        assert engine.verify()


def test_without_a_place_nothing_is_left(tmp_path: Path) -> None:
    """The control."""
    with running_daemon(tmp_path) as daemon:
        with ExitStack() as ending:
            Rows(daemon.socket, "mine", ROW, ending).store(KEYS)
        daemon.restart()
        assert of_arena(daemon)["adopted_rows"] == 0
        with ExitStack() as ending:
            assert found(Rows(daemon.socket, "mine", ROW, ending)) == 0


def test_a_place_is_cleared_when_no_daemon_uses_it(
    tmp_path: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_daemon(tmp_path, arena=str(place)) as daemon, ExitStack() as ending:
        Rows(daemon.socket, "mine", ROW, ending).store(KEYS)
        assert main(["clear", "--arena", str(place)]) == 2
        assert f"in use by process {daemon.pid}" in capsys.readouterr().err
        daemon.stop()
        assert main(["clear", "--arena", str(place)]) == 0
        assert capsys.readouterr().out.endswith(f"from {place}\n")
        assert not place.exists()
        daemon.start()
        assert of_arena(daemon)["adopted_rows"] == 0


def test_a_clear_outlives_the_daemon_too(tmp_path: Path, place: Path) -> None:
    with running_daemon(tmp_path, arena=str(place)) as daemon, ExitStack() as ending:
        Rows(daemon.socket, "mine", ROW, ending).store(KEYS)
        assert main(["clear", "--socket", daemon.socket]) == 0
        daemon.restart()
        assert of_arena(daemon)["adopted_rows"] == 0
        daemon.kill()
        assert main(["clear", "--socket", daemon.socket]) == 1, "nobody did it: said, not ignored"


def test_an_index_of_another_version_is_said_and_started_without(
    tmp_path: Path, place: Path
) -> None:
    """Up or down: the slots that it named are left to whoever may still write to them."""
    with running_daemon(tmp_path, arena=str(place)) as daemon:
        with ExitStack() as ending:
            rows = Rows(daemon.socket, "mine", ROW, ending)
            rows.store(KEYS)
            daemon.kill()
            with (place / "index").open("r+b") as file:
                file.seek(8)
                file.write((99).to_bytes(8, "little"))
            slots = (place / "slots").stat().st_ino
            daemon.start()
            rows.arena[:] = 7
        assert (place / "slots").stat().st_ino != slots
        assert "has format 99, this kvass reads" in of_arena(daemon)["started_empty"]
        assert " adopted=0 " in daemon.ready
        assert "L1 starts empty: the index has format 99" in daemon.log()
        with ExitStack() as ending:
            rows = Rows(daemon.socket, "mine", ROW, ending)
            assert found(rows) == 0
            assert not rows.arena.any(), "an engine of before wrote into the new slots"
        daemon.restart()
        assert of_arena(daemon)["started_empty"] == "", "the next one goes on as usual"


@pytest.mark.parametrize("size", [None, 1 << 20], ids=["removed", "cut"])
def test_slots_that_were_removed_or_cut_are_not_believed(
    tmp_path: Path, place: Path, size: int | None
) -> None:
    """They would be read as zeros."""
    with running_daemon(tmp_path, arena=str(place)) as daemon:
        with ExitStack() as ending:
            Rows(daemon.socket, "mine", ROW, ending).store(KEYS)
        daemon.kill()
        if size is None:
            (place / "slots").unlink()
        else:
            os.truncate(place / "slots", size)
        daemon.start()
        assert (
            of_arena(daemon)["started_empty"]
            == "its slots or its index were removed or have another size"
        )
        with ExitStack() as ending:
            assert found(Rows(daemon.socket, "mine", ROW, ending)) == 0


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, 12),
        ({"l1_size": "128MiB"}, 12),
        ({"l1_size": "32MiB"}, 12),
        ({"lease_s": 5, "reserve_s": 7, "lost_engine_grace_s": 2}, 12),
        ({"quota": ["team=1MiB:0"]}, 12),
        ({"log_level": "debug", "keep_loaded": "no"}, 12),
        ({"arena": "another"}, 0),
        ({"arena": ""}, 0),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else str(value),
)
def test_what_a_changed_option_keeps(
    tmp_path: Path, place: Path, options: dict[str, Any], kept: int
) -> None:
    """The table of docs/operating.md."""
    with running_daemon(tmp_path, arena=str(place)) as before, ExitStack() as ending:
        Rows(before.socket, "mine", ROW, ending).store(KEYS)
        before.kill()
    if options.get("arena"):
        options = {"arena": str(place.with_name(options["arena"]))}
    options = {"arena": str(place), **options}
    with running_daemon(tmp_path, **options) as after, ExitStack() as ending:
        assert found(Rows(after.socket, "mine", ROW, ending)) == kept


def test_an_arena_that_was_made_smaller_and_then_larger_is_empty(
    tmp_path: Path, place: Path
) -> None:
    """A row of the table, too. Not even the size of before is needed for it."""
    lives = {
        "64MiB": (0, "it is new"),
        "32MiB": (12, ""),
        "33MiB": (0, "the arena was larger once, and a writer of that time may still write"),
        "34MiB": (12, ""),
    }
    for size, (kept, why) in lives.items():
        with running_daemon(tmp_path, size, arena=str(place)) as daemon, ExitStack() as ending:
            rows = Rows(daemon.socket, "mine", ROW, ending)
            assert (found(rows), of_arena(daemon)["started_empty"]) == (kept, why), size
            if not kept:
                rows.store(KEYS)
            daemon.kill()


def test_a_process_of_a_tier_has_the_lock_until_it_ends(tmp_path: Path, place: Path) -> None:
    """So no other daemon uses the slots to which it may write."""
    (tmp_path / "disk").mkdir()
    tier = [f"disk:{tmp_path}/disk?capacity=16MiB"]
    with running_daemon(tmp_path, arena=str(place), tier=tier) as daemon:
        held = (place / "lock").stat().st_ino
        (child,) = children(daemon.pid)
        open_files = [os.stat(fd).st_ino for fd in Path(f"/proc/{child}/fd").iterdir()]
        assert held in open_files
        daemon.restart()
        assert of_arena(daemon)["started_empty"] == ""


STUCK = """
import signal, sys
from kvass.arena.memory import Arena
from kvass.cli.main import main

Arena.close = lambda arena: signal.pause()
sys.exit(main())
"""
"""A daemon that takes forever to unmap its arena."""


def test_the_next_daemon_serves_while_the_former_one_unmaps_the_arena(
    tmp_path: Path, place: Path
) -> None:
    """That takes minutes with 1 TiB."""
    with running_daemon(tmp_path, program=("-c", STUCK), arena=str(place)) as before:
        with ExitStack() as ending:
            Rows(before.socket, "mine", ROW, ending).store(KEYS)
        os.kill(before.pid, signal.SIGTERM)
        deadline_s = time.monotonic() + ENDS_S
        while Path(before.socket + ".lock").exists():
            assert time.monotonic() < deadline_s, "it keeps the path"
            time.sleep(0.01)
        with running_daemon(tmp_path, arena=str(place)) as after, ExitStack() as ending:
            assert found(Rows(after.socket, "mine", ROW, ending)) == 12
            assert before.running


def children(pid: int) -> list[int]:
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_former_process_is_told_by_its_start() -> None:
    ours, start = os.getpid(), start_time(os.getpid())
    assert start > 0
    alive = former_process(ours, start)
    assert alive is not None
    alive.close()
    assert former_process(ours, start - 1) is None, "its pid was given to another process"


def test_a_former_process_whose_pid_is_a_thread_s_now_has_ended() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    assert thread.native_id is not None
    try:
        assert former_process(thread.native_id, start_time(os.getpid())) is None
    finally:
        over.set()
        thread.join()


WITHOUT_PIDFDS = (
    "-c",
    """
import errno, os, sys
from kvass.cli.main import main
from kvass.daemon import peer_process

def pidfd_open(pid, flags=0):
    raise OSError(errno.ENOSYS, "Function not implemented")

os.pidfd_open, peer_process._SO_PEERPIDFD = pidfd_open, 9999
sys.exit(main())
""",
)
"""A daemon on a kernel such as gVisor's, or under an old seccomp profile."""


def test_a_kernel_without_pidfds_has_the_time_bound_after_a_kill(
    tmp_path: Path, place: Path
) -> None:
    with running_daemon(tmp_path, "4MiB", WITHOUT_PIDFDS, arena=str(place)) as daemon:
        with FakeEngine(daemon.socket, WORLD, spread(WORLD, MODEL)) as engine:
            assert engine.store(range(64)) == 4
            what = engine.reserve(range(1000, 1064))
            assert what is not None
            assert engine.hand_over(what)
            daemon.kill()
        daemon.start()
        fields = of_arena(daemon)
        assert fields["adopted_rows"] == 4 * len(MODEL.groups)
        assert fields["resting_pids"] == []
        assert 0 < fields["resting_s"] <= 30
        assert "cannot be watched: " in daemon.log()
        daemon.wait_until(l1_resting_bytes=0)


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM, errno.EMFILE, None])
def test_of_a_process_that_cannot_be_watched_the_pid_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, error: int | None
) -> None:
    """None: a pid that no kernel has."""
    index = Memory().create()
    index.processes.note_worker(1, os.getpid() if error else 0xFFFFFFFF, 5, 7)
    index.processes.begin(pids_known=True)

    def pidfd_open(pid: int) -> int:
        raise OSError(error, "no")

    if error:
        monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    assert former_processes(index) == {}
    (former,) = index.processes.former()
    assert former.pid == 0


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="only root can mount"
)
def test_a_file_system_without_room_for_the_index_is_refused_before_it_is_ready(
    tmp_path: Path,
) -> None:
    options = f"-t tmpfs -o size=17m,mode=755 none {tmp_path}"
    flags = f"--socket {tmp_path}/s --l1-size 16MiB --arena {tmp_path}/kvass"
    command = f"mount {options} && exec {sys.executable} {' '.join(KVASS)} serve {flags}"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command], capture_output=True, text=True, timeout=60
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout == ""
    assert "L1 and its index, 21.02MiB, do not fit into the 16.99MiB" in done.stderr


def test_a_second_daemon_gets_neither_the_place_nor_the_socket(tmp_path: Path, place: Path) -> None:
    with running_daemon(tmp_path, arena=str(place)) as daemon:
        other = ("--socket", str(tmp_path / "other"), "--l1-size", "1MiB", "--arena", str(place))
        assert f"in use by process {daemon.pid}" in refused(serve(*other))
        assert "arena" in refused(serve("--arena", str(tmp_path / "on-a-disk"), *other[:4]))


# ---------------------------------------------------------------- while engines store and load


def checked_load(engine: FakeEngine, prompt: range) -> int:
    """Load what is cached of a prompt. Returns how many pages were loaded, each of them right, also
    if the daemon ended meanwhile."""
    what = engine.match(prompt)
    if what is None:
        return 0
    if not engine.hand_over(what):
        engine.give_back(what)
        return 0
    engine.copy(what)
    try:
        engine.wait(what)
    except Unavailable:
        with what.changed:
            assert what.changed.wait_for(lambda: {*what.ranks} <= what.outcomes.keys(), PATIENCE_S)
        if not what.whole:
            return 0
        return sum(rank.memory.verify(what.keys, what.tables) for rank in engine.ranks)
    return engine.verify()


def killed_again_and_again(folder: Path, place: Path, kills: int, seed: int = 1) -> list[int]:
    """Kill a daemon at any instant while an engine stores and loads, and check every page that is
    loaded. Returns, for each kill, how many rows the next daemon adopted."""
    rng, adopted = random.Random(seed), list[int]()
    prompts = [range(n * 1000, n * 1000 + 16 * rng.randint(2, 12)) for n in range(40)]
    layouts = spread(WORLD, MODEL)
    options: dict[str, Any] = {"lost_engine_grace_s": 0.2, "lease_s": 1, "reserve_s": 1}
    with running_daemon(folder, "4MiB", arena=str(place), **options) as daemon:
        with closing(FakeEngine(daemon.socket, WORLD, layouts, blocks=1 << 14)) as engine:
            loaded = 0
            for _ in range(kills):
                for prompt in rng.sample(prompts, 3):
                    engine.store(prompt)
                killer = threading.Timer(rng.uniform(0.0, 0.05), daemon.kill)
                killer.start()
                while killer.is_alive():
                    with suppress(Unavailable):
                        engine.store(rng.choice(prompts))
                    loaded += checked_load(engine, rng.choice(prompts))
                killer.join()
                daemon.start()
                adopted.append(of_arena(daemon)["adopted_rows"])
                engine.wait_connected()
                loaded += sum(checked_load(engine, each) for each in rng.sample(prompts, 4))
            assert loaded, "nothing was proven"
        daemon.wait_until(quarantined_bytes=0, leases=0)
    return adopted


GULLIBLE = """
import sys
from kvass.cli.main import main
from kvass.core import adoption
right = adoption._judge

def judge(state, rows):
    table = state.rows.table
    table.state[rows[table.state[rows] == adoption.WRITING]] = adoption.READY
    table.loader[rows] = table.seals_of(rows)
    return right(state, rows)

adoption._judge = judge
sys.exit(main())
"""
"""A daemon that adopts a row whether it is sealed or not."""


@pytest.mark.parametrize("program", [KVASS, ("-c", GULLIBLE)], ids=["kvass", "the control"])
def test_what_was_being_written_is_no_hit(
    tmp_path: Path, place: Path, program: tuple[str, ...]
) -> None:
    layouts, prompt, other = spread(WORLD, MODEL), range(64), range(1000, 1064)
    with (
        running_daemon(tmp_path, "4MiB", program, arena=str(place)) as daemon,
        FakeEngine(daemon.socket, WORLD, layouts) as engine,
    ):
        assert engine.store(other) == 4
        what = engine.reserve(prompt)
        assert what is not None
        assert engine.hand_over(what)
        daemon.restart()
        engine.wait_connected()
        assert engine.load(other) == 4
        found = engine.load(prompt)
        if program == KVASS:
            assert found == 0
            assert engine.verify()
        else:
            with pytest.raises(WrongPageError):
                engine.verify()


def test_no_page_is_wrong_whenever_the_daemon_is_killed(tmp_path: Path, place: Path) -> None:
    """By hand, with another number: ``killed_again_and_again``."""
    adopted = killed_again_and_again(tmp_path, place, 8)
    assert all(adopted)
