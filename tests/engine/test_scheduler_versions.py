"""A8 through the connector: vLLM's real scheduler, and a daemon of another protocol."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvass.client import reconnecting
from kvass.messages import Error, FromClient, FromDaemon, Hello, Lookup, Reserve
from tests.support.vllm.ranks import StubModelEngine
from tests.support.waiting import eventually
from tests.support.wire.scripted_daemon import ScriptedDaemon

PROMPT = list(range(100))


def too_new(message: FromClient) -> list[FromDaemon]:
    text = "this daemon speaks protocol 7..9, you 1..1: install matching versions"
    return [Error(seq=message.seq, code="incompatible_version", text=text, fatal=True)]


def test_a8_an_engine_beside_a_daemon_out_of_range_runs_uncached_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reconnecting, "BACKOFF_LASTING_S", 0.02)  # many attempts, still one line
    with ScriptedDaemon(tmp_path / "kvass.sock") as daemon:
        daemon.answers[Hello] = too_new
        engine = StubModelEngine(daemon.path)
        try:
            for client in (engine.client, engine.copier._client):
                assert eventually(lambda client=client: client.counters["failed_incompatible"] > 3)  # type: ignore[misc]
            for name in ("first", "again"):
                request = engine.generate(name, PROMPT)
                assert len(request.output_token_ids) == 2
            assert not engine.loads
        finally:
            engine.close()
        assert not [m for m in daemon.received if isinstance(m, Lookup | Reserve)]
    said = [r.getMessage() for r in caplog.records if "speaks protocol" in r.getMessage()]
    assert len(said) == 2, "one of the scheduler's process, one of the rank's"
    assert all("7..9" in line and "1 to 1" in line and "uncached" in line for line in said)
    assert {r.levelno for r in caplog.records if "speaks protocol" in r.getMessage()} == {
        logging.WARNING
    }


def test_a8_an_older_daemon_that_tells_no_given_s_costs_failed_loads_and_no_wrong_byte(
    tmp_path: Path,
) -> None:
    """No rank may copy what was given at an unknown time: the engine computes all of it."""
    with ScriptedDaemon(tmp_path / "kvass.sock") as daemon:
        daemon.answers[Lookup] = daemon.hit  # neither says given_s
        daemon.answers[Reserve] = daemon.grant
        engine = StubModelEngine(daemon.path)
        try:
            engine.wait_connected()
            engine.rank.memory[:] = 0
            request, found = engine.load("r", PROMPT)
            assert engine.loads, "the control: the match was handed to the rank"
            assert found == 0
            engine.verify(request, 96)
        finally:
            engine.close()
