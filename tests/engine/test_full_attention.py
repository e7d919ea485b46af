"""D7: a model of full attention alone says and stores what it did before there were other groups.

``full_attention.json`` holds what this very history said to the daemon, session by session, and the
digest of the arena it left, before the first line for windows and states was written.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from kvass.messages import Hello, Message, Ping, Register
from kvass.testing.daemon import Daemon, running_daemon
from kvass.wire.channel import Channel
from tests.support.vllm.ranks import StubModelEngine

FROZEN: Final = Path(__file__).parent / "full_attention.json"


def said(message: Message) -> Any:
    """A message as it is encoded, but for what differs from run to run. ``model`` is a path."""
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    for name in ("seq", "boot", "instance", "identity", "clock_s", "model"):
        fields.pop(name, None)
    for group in (fields.get("layout") or {}).get("groups", ()):  # without their pages' formats
        group["layers"] = [layer.partition("@")[0] for layer in group["layers"]]
    return json.loads(json.dumps(fields, default=lambda raw: raw.hex(), sort_keys=True))


def history(folder: Path, patch: pytest.MonkeyPatch, pages: dict[str, Any]) -> dict[str, Any]:
    """What each session said, and a digest of the arena, over a store, a hit and two turns."""
    sessions: dict[int, list[Any]] = defaultdict(list)
    send = Channel.send

    def recording(channel: Channel, message: Any) -> None:
        if not isinstance(message, Hello | Ping):
            sessions[id(channel)].append(message)
        send(channel, message)

    patch.setattr(Channel, "send", recording)
    with running_daemon(folder) as daemon:
        digest = _run(daemon, pages)
    by_rank: dict[str, list[Any]] = {}
    for messages in sessions.values():
        first = messages[0]
        if isinstance(first, Register):
            number = sum(name.startswith(f"{first.rank}.") for name in by_rank)
            by_rank[f"{first.rank}.{number}"] = [said(message) for message in messages]
    return {"sessions": by_rank, "arena": digest}


def _run(daemon: Daemon, pages: dict[str, Any]) -> str:
    """Two engines, one after the other."""
    a = StubModelEngine(daemon.socket, daemon, **pages)
    a.wait_connected()
    turn = a.generate("first", range(100), max_tokens=40)
    a.generate("short", range(50))
    daemon.wait_until(reservations=0, leases=0)
    b = StubModelEngine(daemon.socket, daemon, **pages)
    b.wait_connected()
    b.load("hit", range(100))
    b.load("next", [*turn.all_token_ids, 1, 2, 3])
    daemon.wait_until(reservations=0, leases=0)
    session = b.copier._client.session
    digest = hashlib.sha256(session.arena.buffer[: 1 << 20]).hexdigest()
    for engine in (a, b):
        engine.close()
    return digest


def test_d7_full_attention_says_and_stores_what_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: dict[str, Any]
) -> None:
    now, before = history(tmp_path, monkeypatch, pages), json.loads(FROZEN.read_text())
    assert now["sessions"].keys() == before["sessions"].keys() == {"-1.0", "-1.1", "0.0", "0.1"}
    for name, messages in before["sessions"].items():
        assert now["sessions"][name] == messages, name
    assert now["arena"] == before["arena"]
