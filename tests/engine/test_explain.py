"""``kvass explain``, from vLLM's scheduler through a daemon to the command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvass.cli.main import main
from kvass.testing.daemon import Daemon, running_daemon
from tests.support.vllm.ranks import StubModelEngine, until

PROMPT = list(range(100))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with running_daemon(tmp_path, lookup_budget_ms=10_000) as daemon:
        yield daemon


class Explained:
    """What the command says."""

    def __init__(self, daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
        self.daemon, self.capsys = daemon, capsys

    def of(self, request: str) -> dict[str, Any]:
        """The last lookup of a request."""
        argv = ["explain", "--request", request, "--json", "--socket", self.daemon.socket]
        assert main(argv) == 0
        found: list[dict[str, Any]] = json.loads(self.capsys.readouterr().out)
        return found[-1]


def connected(daemon: Daemon) -> StubModelEngine:
    engine = StubModelEngine(daemon.socket, daemon)
    engine.wait_connected()
    return engine


def run(engine: StubModelEngine, name: str, tokens: list[int], **fields: Any) -> None:
    """Run one request, without waiting for its stores."""
    request = engine.world.add(name, tokens, **fields)
    until(lambda: engine.step() and request.is_finished(), "the request's end")


def test_from_a_scheduler_to_the_command(
    daemon: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    explained = Explained(daemon, capsys)
    a = connected(daemon)
    a.generate("cmpl-1-0-aabbccdd", PROMPT)
    entry = explained.of("cmpl-1")
    assert (entry["request"], entry["why"], entry["prompt_tokens"]) == ("cmpl-1-0", "absent", 100)
    assert (entry["local_tokens"], entry["hit_tokens"], entry["asked_tokens"]) == (0, 0, 96)
    a.generate("own", PROMPT)
    assert explained.of("own")["why"] == "own_hit"
    b = connected(daemon)
    b.load("hit", PROMPT)
    entry = explained.of("hit")
    assert (entry["why"], entry["hit_tokens"], entry["end_token"]) == ("", 96, 96)
    b.generate("short", PROMPT[:9])
    assert explained.of("short")["why"] == "too_short"
    run(b, "salted", PROMPT, salt="another")
    assert explained.of("salted")["text"].startswith("This engine saw the beginning")
    b.close()
    assert main(["clear", "--socket", daemon.socket]) == 0
    assert capsys.readouterr().out.startswith("cleared ")
    c = connected(daemon)
    c.generate("cleared", PROMPT)
    assert explained.of("cleared")["cause"] == "cleared"
    assert daemon.stop() == 0
    run(c, "away", list(range(200, 300)))
    daemon.start()
    c.wait_connected()
    c.generate("back", list(range(300, 400)))
    assert explained.of("away")["why"] == "no_daemon"
    assert explained.of("back")["why"] == "absent"
    c.close()
    a.close()
