"""A Redis server that starts again from its last snapshot brings back nothing that was cleared."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from kvass.messages import Clear, Cleared, Lookup, Matched
from kvass.testing.daemon import running_daemon
from tests.daemon.tier_rig import commit_two, tier_of
from tests.support.servers.redis import RedisServer
from tests.support.waiting import eventually
from tests.support.wire.raw_session import WIDTH, RawSession, engine, keys


def found(scheduler: RawSession) -> int:
    """How many chunks the daemon finds; it waits for its tier."""
    ask = Lookup(request="q", digests=keys("ab"), width=WIDTH, budget_ms=10_000.0)
    return scheduler.ask(ask, Matched).chunks


def notes(server: RedisServer) -> dict[bytes, bytes]:
    client: Any = server.client()
    return {name: client.get(name) for name in client.keys("kvass:n:*")}


def test_what_was_cleared_stays_cleared_after_a_restart_from_a_snapshot(tmp_path: Path) -> None:
    with closing(RedisServer()) as server:
        client: Any = server.client()
        tier = [f"redis:{server.address}"]
        (tmp_path / "other").mkdir()
        with running_daemon(tmp_path, tier=tier) as daemon, engine(daemon.socket) as peers:
            commit_two(*peers)
            assert eventually(lambda: len(client.keys("kvass:r:*")) == 2)
            client.save()
            before = notes(server)
            peers[0].ask(Clear(), Cleared)
            assert notes(server) != before
            server.kill()
            assert eventually(lambda: not found(peers[0]) and tier_of(daemon)["up"] is False)
            server.start()
            client = server.client()
            assert len(client.keys("kvass:r:*")) == 2, "it did not load its snapshot"
            assert eventually(lambda: not found(peers[0]) and tier_of(daemon)["up"] is True)
            assert eventually(lambda: notes(server) != before), "the daemon left the old note"
        with running_daemon(tmp_path / "other", tier=tier) as other:
            with engine(other.socket) as peers:
                assert found(peers[0]) == 0
            assert other.stop() == 0
            for name, value in before.items():
                client.set(name, value)  # with the old note they would be found
            other.start()
            with engine(other.socket) as peers:
                assert found(peers[0]) == 2
