"""Forks of ``tests/support/template.py``: what happens around them ends none of them."""

from __future__ import annotations

import io
import json
import os
import select
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.template import Forked, Template
from tests.support.waiting import eventually

SAYS = """
import os, sys
print(os.getppid(), flush=True)
sys.exit(sys.stdin.read() or None)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "says.py").write_text(SAYS)
    return tmp_path / "t.sock"


@pytest.fixture
def template(place: Path) -> Iterator[Template]:
    # A job in the background ignores it, and so would all that it starts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    one = Template(place, {**os.environ, "PYTHONPATH": f"{place.parent}:{Path.cwd()}"}, "json")
    yield one
    signal.signal(signal.SIGINT, before)
    one._control.close()
    assert one._process.wait(10) == 0


def fork(template: Template, stderr: int = 2) -> Forked:
    return template.fork(["says"], os.environ, stderr)


def told(one: Forked, text: bytes = b"") -> int:
    """End it, with ``text`` for its ``sys.exit``; the exit status."""
    with one.stdout:
        one.stdin.write(text)
        one.stdin.close()
        return one.wait(10)


def test_a_client_that_is_killed_before_it_reads_takes_no_other_with_it(
    template: Template, place: Path
) -> None:
    before = fork(template)
    request = json.dumps([["says"], dict(os.environ), os.getcwd()]).encode()
    (inner, told_it), (from_it, its), (status, tells) = os.pipe(), os.pipe(), os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.connect(str(place))
        socket.send_fds(other, [request], [inner, its, 2, tells])
        assert select.select([other], [], [], 10)[0]
    after = fork(template)
    assert (told(before), told(after)) == (0, 0)
    os.close(told_it)
    assert select.select([status], [], [], 10)[0]
    assert os.read(status, 16) == b"0"
    for fd in (inner, from_it, its, status, tells):
        os.close(fd)


def test_an_interrupt_of_all_ends_only_what_it_would_end_without_a_template(
    template: Template,
) -> None:
    one = fork(template)
    parent = int(one.stdout.readline())
    for pid in (template._process.pid, parent):
        os.kill(pid, signal.SIGINT)
    assert one.poll() is None
    other = fork(template)
    other.stdout.readline()

    def interrupted() -> bool:  # Python may take the first one and then begin to read
        other.send_signal(signal.SIGINT)
        return other.poll() is not None

    assert eventually(interrupted)
    assert other.wait() == -signal.SIGINT
    other.stdin.close()
    other.stdout.close()
    assert told(one) == 0


class Hangs(io.BytesIO):
    def read(self, _: int | None = -1) -> bytes:
        raise TimeoutError


def test_a_test_that_takes_too_long_leaves_no_fork(template: Template) -> None:
    one = fork(template)
    one.stdout.close()
    one.stdout, held = Hangs(), os.dup(one.stdin.fileno())  # or it would end by itself
    with pytest.raises(TimeoutError):
        one.ran()
    assert one.wait(10) == -signal.SIGKILL
    os.close(held)


def test_what_a_program_ends_with_is_said(template: Template) -> None:
    with tempfile.TemporaryFile() as log:
        assert told(fork(template, log.fileno()), b"why not") == 1
        log.seek(0)
        assert log.read() == b"why not\n"
