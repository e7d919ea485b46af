"""The log: who came, was refused and why; bounded, structured on request, in nobody's way."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvass.cli.main import main
from kvass.client.health import notes, troubles
from kvass.daemon import logs
from kvass.messages import Clear, Cleared, Error, Ping, Pong, Register, Registered
from kvass.testing.daemon import running_daemon
from kvass.types import SCHEDULER
from tests.daemon.test_process import as_user, open_folder, stranger, try_to_connect
from tests.support.wire.raw_session import LAYOUT, RawSession

__all__ = ["open_folder", "stranger"]


def test_who_registered_was_refused_cleared_and_went_is_said(
    open_folder: Path, stranger: int
) -> None:
    with running_daemon(open_folder, "16MiB", log_format="json", log_level="debug") as daemon:
        os.chmod(daemon.socket, 0o666)
        as_user(stranger, [], try_to_connect(daemon.socket))
        with RawSession(daemon.socket).greet() as worker:
            me = Register(
                instance="e\n2", identity={}, chunk_tokens=16, rank=0, layout=LAYOUT, model="llama"
            )
            for _ in range(3):  # said once
                worker.ask(me, Registered)
            with RawSession(daemon.socket).greet() as twin:
                twin.ask(me, Error)
        with RawSession(daemon.socket).greet() as other:
            other.ask(Clear(everything=True), Cleared)
        assert daemon.stop() == 0
        lines = [json.loads(line) for line in daemon.log().splitlines()]
    assert {"time", "level", "message"} <= lines[0].keys()
    said = [line["message"] for line in lines if line["level"] == "info"]
    info = [text.partition(")")[2] or text for text in said]
    mine = f"pid {os.getpid()} uid {os.geteuid()}"
    assert f"uid {stranger} refused: forbidden: " in info[0]
    assert f"--allow-uid {stranger} lets it, and its session ends" in info[0]
    assert info[1].startswith(" registered, model llama, namespace ")
    assert info[2:] == [
        f"{mine} refused: rank_taken: rank 0 of instance 'e\\n2' is alive already",
        " disconnected",
        f"{mine} cleared 0 rows",
        "stopping; 0 rows are left to flush",
    ]
    registered = next(line for line in lines if "registered" in line["message"])
    assert (registered["engine"], registered["rank"], registered["pid"]) == ("e\n2", 0, os.getpid())
    probes = [line for line in lines if line["message"] == f"{mine} connected"]
    assert {line["level"] for line in probes} == {"debug"}


def test_an_l1_that_is_too_small_for_an_engines_cache_is_logged_once_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_daemon(tmp_path, "16MiB") as daemon, ExitStack() as sessions:
        for name, size in (("fits", 5 << 20), ("fits too", 3 << 20), ("crosses", 1 << 20)):
            scheduler, worker = (
                sessions.enter_context(RawSession(daemon.socket).greet()) for _ in range(2)
            )
            scheduler.register(name, SCHEDULER)
            worker.register(name, 0, cache_bytes=size)
            for _ in range(2):
                scheduler.register(name, SCHEDULER)
            fields = daemon.status()
            assert len(notes(fields)) == (name == "crosses"), name
        assert not troubles(fields), "it works, and hits seldom"
        assert main(["status", "--check", "--socket", daemon.socket]) == 0
        assert main(["status", "--socket", daemon.socket]) == 0
        said = " ".join(capsys.readouterr().out.split())
        sessions.close()
        assert daemon.stop() == 0
        (line,) = [line for line in daemon.log().splitlines() if "less than twice" in line]
    assert "WARNING engine crosses scheduler" in line
    assert "L1 of 16MiB is less than twice the engines' own KV caches together (9MiB)" in line
    assert "--l1-size 18MiB or more, or a tier (docs/sizing.md)" in line
    (text,) = notes(fields)
    assert line.endswith(text)
    assert said.startswith(f"ok note: {text} kvass ")
    assert f" OK - {text} memory" in said
    tier = {"tier": "disk:/d", "up": True, "store_failures": 0, "stored_rows": 0}
    assert notes({**fields, "tiers": [tier | {"place": 1}]}) == []
    assert notes({**fields, "tiers": [tier | {"place": 0}]}) == [text], "it was removed"


def test_text_of_peers_makes_no_lines() -> None:
    record = logging.LogRecord(
        "kvass", logging.INFO, "f", 1, "%s", ("a\n2026 ERROR \x1b[2Jb",), None
    )
    line = logs._Text().format(record)
    assert line.endswith("INFO a\n  2026 ERROR \\x1b[2Jb")


def test_a_name_that_is_no_utf8_does_not_end_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    writer = logs._Writer()
    writer.setFormatter(logs._Text())
    for text in ("file \udcff", "after it"):
        writer.emit(logging.LogRecord("kvass", logging.INFO, "f", 1, text, (), None))
    writer.close()
    assert [line.split("INFO ")[1] for line in capfd.readouterr().err.splitlines()] == [
        "file \\udcff",
        "after it",
    ]


def test_one_place_in_the_code_does_not_fill_the_log() -> None:
    limit, place = logs._Limit(), {"pathname": "f", "lineno": 1, "msg": "m %d", "args": (1,)}

    def passes(at: float, level: int = logging.INFO, line: int = 1) -> str | None:
        record = logging.makeLogRecord({**place, "levelno": level, "lineno": line, "created": at})
        return record.getMessage() if limit.filter(record) else None

    assert [passes(100.0) for _ in range(logs.BURST)] == ["m 1"] * logs.BURST
    assert passes(101.0) is passes(102.0) is None
    assert passes(102.0, line=2) == "m 1"
    assert passes(102.0, logging.CRITICAL) == "m 1"
    assert passes(111.0) == "m 1 (3 such lines were left out)"
    assert passes(112.0) == "m 1"


def test_a_stuck_reader_of_the_log_holds_up_nobody(tmp_path: Path) -> None:
    socket = str(tmp_path / "s")
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)  # what nobody reads
    command = [sys.executable, "-m", "kvass", "serve", "--l1-size=1MiB", f"--socket={socket}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writing) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline()
        with RawSession(socket).greet() as peer:
            wrong = Register(instance="e", identity={}, chunk_tokens=1, rank=-9, model="m")
            for _ in range(logs.BURST):
                assert "rank" in peer.ask(wrong, Error).text
            assert select.select([reading], [], [], 10)[0]
            assert not select.select([], [writing], [], 0)[1], "the pipe is full"
            peer.ask(Ping(), Pong)
        daemon.terminate()
        assert daemon.wait(30) == 0
    os.close(writing)
    os.close(reading)
