"""A store whose endpoint turns into a login page and back, under a daemon."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from kvass.cli.main import main
from kvass.messages import Commit, Ping, Pong
from kvass.testing.daemon import running_daemon
from tests.daemon.tier_rig import tier_of
from tests.support.servers.front import PAGE, Front
from tests.support.servers.s3 import S3Server, credentials
from tests.support.waiting import eventually
from tests.support.wire.raw_session import RawSession, engine


def commit(scheduler: RawSession, worker: RawSession, names: str) -> None:
    granted = scheduler.reserve(names)
    for grant in granted.grants:
        worker.channel.send(Commit(boot=granted.boot, reservation=grant.reservation))
    worker.ask(Ping(), Pong)


@pytest.mark.slow  # what it puts together is tested in test_executor_checks and test_strangers
def test_a_login_page_is_a_tier_that_is_down_until_the_store_is_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        credentials(),
        closing(S3Server()) as server,
        closing(Front(server.endpoint)) as front,
        running_daemon(tmp_path, tier=[front.url("turns")]) as daemon,
        engine(daemon.socket) as peers,
    ):
        status = ["status", "--check", "--socket", daemon.socket]
        clear = ["clear", "--tier", "--socket", daemon.socket]
        commit(*peers, "ab")
        assert eventually(lambda: tier_of(daemon)["stored_rows"] == 2)
        assert main(status) == 0

        front.everything = PAGE
        commit(*peers, "cd")
        assert eventually(lambda: tier_of(daemon)["up"] is False)
        assert "<!DOCTYPE html> <html>" in tier_of(daemon)["trouble"]
        assert main(status) == 1
        capsys.readouterr()
        assert main(clear) == 1
        assert "<!DOCTYPE html> <html>" in capsys.readouterr().err
        commit(*peers, "ef")
        assert tier_of(daemon)["stored_rows"] == 2, "a page has stored nothing"
        assert len(server.names("turns/records/")) == 2

        front.everything = None
        assert eventually(lambda: tier_of(daemon)["up"] is True)
        assert eventually(lambda: tier_of(daemon)["stored_rows"] == 4), "what waited in L1"
        assert main(status) == 0
        assert main(clear) == 0
        assert server.names("turns/records/") == []
