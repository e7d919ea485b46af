"""When the core fails the daemon ends, and what it leaves plays the failure again."""

from __future__ import annotations

import base64
import json
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvass import messages as m
from kvass.core import machine as core
from kvass.core.effects import PopulatedTo, Received, Tick
from kvass.core.event_lines import parse
from kvass.core.machine import CoreConfig
from kvass.daemon.last_events import MAX_EVENTS, MAX_FRAME_BYTES, LastEvents
from kvass.wire import framing
from tests.support.simulation.simulator import replay

TOKENS = b"what the user said, in tokens"
DEFECT = """
import sys
from kvass import messages
from kvass.core import machine
def broken(state, session, message):
    assert state.now < 0, "broken on purpose"
machine._MESSAGES[messages.IndexChunks] = broken
from kvass.cli.main import main
sys.exit(main(['serve', '--l1-size', '1MiB', '--socket', sys.argv[1]]))
"""
CONFIG = CoreConfig(boot=bytes(16), arena_bytes=1 << 20, seed=b"a secret")


def broken(*_: object) -> None:
    raise AssertionError("broken on purpose")


def test_the_daemon_ends_and_its_last_events_play_the_failure_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, left = str(tmp_path / "s"), tmp_path / "s.failed"
    left.write_text("an older one")
    left.chmod(0o644)
    with subprocess.Popen(
        [sys.executable, "-c", DEFECT, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(path)
            hello = m.Hello(seq=1, clock_s=time.monotonic())
            bad = m.IndexChunks(seq=2, space=b"", digests=b"d" * 32, tokens=TOKENS)
            peer.sendall(framing.encode(hello) + framing.encode(bad))
            assert process.wait(timeout=30) == 1
        told = process.stderr.read().decode()
    assert "broken on purpose" in told
    (logged,) = [x for x in told.splitlines() if "the core failed at this event" in x]
    assert f"events are in {left}" in told
    assert stat.S_IMODE(left.stat().st_mode) == 0o600
    lines = left.read_text().splitlines()
    head = json.loads(lines[0])
    assert "broken on purpose" in head["traceback"]
    assert (head["dropped"], head["config"]["seed"]) == (0, "")
    assert base64.b64encode(TOKENS[:27]).decode() not in left.read_text() + told
    now, event = parse(lines[-1])
    assert (now, event) == parse(logged[logged.index("[") :])
    assert isinstance(event, Received)
    assert event.message == m.IndexChunks(
        seq=2, space=b"", digests=b"d" * 32, tokens=bytes(len(TOKENS))
    )
    replay(lines)  # a core without the defect
    monkeypatch.setitem(core._MESSAGES, m.IndexChunks, broken)
    with pytest.raises(AssertionError, match="broken on purpose"):
        replay(lines)


def test_no_more_events_and_bytes_are_kept_than_may_be(tmp_path: Path) -> None:
    last, path = LastEvents(CONFIG), tmp_path / "s.failed"
    for n in range(MAX_EVENTS + 7):
        last.add(float(n), PopulatedTo(n), 0)
    last.write(str(path), AssertionError())
    head, *events = path.read_text().splitlines()
    assert [parse(text)[0] for text in events] == [float(n) for n in range(7, MAX_EVENTS + 7)]
    assert json.loads(head)["dropped"] == 7
    for n in range(3):
        last.add(500.0 + n, Tick(), MAX_FRAME_BYTES // 2)
    last.add(600.0, Tick(), 2 * MAX_FRAME_BYTES)
    last.write(str(path), AssertionError())
    assert [parse(text)[0] for text in path.read_text().splitlines()[1:]] == [600.0]


def test_a_file_that_cannot_be_written_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    last = LastEvents(CONFIG)
    last.write(str(tmp_path / "none" / "s.failed"), AssertionError())
    assert f"{tmp_path}/none/s.failed, for the last events: No such file" in caplog.text
