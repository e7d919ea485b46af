"""A store under a daemon: a stranger answers at its address for a while, or one of its objects is
archived."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.rows import Rows, flushed, tier_status, wait_tier
from kvass.cli.bench.rig import WIDTH
from kvass.cli.main import main
from kvass.messages import Commit, Ping, Pong
from kvass.testing.daemon import Daemon, running_daemon
from tests.daemon.tier_rig import tier_of
from tests.support.servers.forwarder import Forwarder
from tests.support.servers.front import PAGE, Front
from tests.support.servers.redis import RedisServer
from tests.support.servers.s3 import S3Server, credentials
from tests.support.waiting import eventually
from tests.support.wire.raw_session import RawSession, engine


def commit(scheduler: RawSession, worker: RawSession, names: str) -> None:
    granted = scheduler.reserve(names)
    for grant in granted.grants:
        worker.channel.send(Commit(boot=granted.boot, reservation=grant.reservation))
    worker.ask(Ping(), Pong)


class Place(NamedTuple):
    """``url`` of a tier, ``turn(whether)`` a stranger answers there, ``held()`` records of the
    store itself. ``words``: the stranger's, in ``trouble``."""

    url: str
    turn: Callable[[bool], object]
    held: Callable[[], int]
    words: str


@contextmanager
def redis_place() -> Iterator[Place]:
    with (
        closing(RedisServer()) as server,
        closing(Front()) as stranger,
        closing(Forwarder(server.socket)) as front,
    ):
        client: Any = server.client()

        def turn(whether: bool) -> None:
            front.target = ("127.0.0.1", stranger.port) if whether else server.socket
            front.cut()

        yield Place(
            f"redis:127.0.0.1:{front.port}",
            turn,
            lambda: len(client.keys("kvass:r:*")),
            "Protocol",
        )


@contextmanager
def s3_place() -> Iterator[Place]:
    with credentials(), closing(S3Server()) as server, closing(Front(server.endpoint)) as front:

        def turn(whether: bool) -> None:
            front.everything = PAGE if whether else None

        yield Place(
            front.url("turns"),
            turn,
            lambda: len(server.names("turns/records/")),
            "<!DOCTYPE html> <html>",
        )


@pytest.mark.parametrize("make", [redis_place, pytest.param(s3_place, marks=pytest.mark.slow)])
def test_a_stranger_is_a_tier_that_is_down_until_the_store_is_back(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    make: Callable[[], AbstractContextManager[Place]],
) -> None:
    """A web server, and a login page."""
    with (
        make() as place,
        running_daemon(tmp_path, tier=[place.url]) as daemon,
        engine(daemon.socket) as peers,
    ):
        status = ["status", "--check", "--socket", daemon.socket]
        clear = ["clear", "--tier", "--socket", daemon.socket]
        commit(*peers, "ab")
        assert eventually(lambda: tier_of(daemon)["stored_rows"] == 2)
        assert main(status) == 0

        place.turn(True)
        commit(*peers, "cd")
        assert eventually(lambda: tier_of(daemon)["up"] is False)
        assert place.words in tier_of(daemon)["trouble"]
        assert main(status) == 1
        capsys.readouterr()
        assert main(clear) == 1
        assert place.words in capsys.readouterr().err
        commit(*peers, "ef")
        assert tier_of(daemon)["stored_rows"] == 2, "a page has stored nothing"
        assert place.held() == 2

        place.turn(False)
        assert eventually(lambda: tier_of(daemon)["up"] is True)
        assert eventually(lambda: tier_of(daemon)["stored_rows"] == 4), "what waited in L1"
        assert main(status) == 0
        assert main(clear) == 0
        assert place.held() == 0


@contextmanager
def engine_of(daemon: Daemon) -> Iterator[Rows]:
    with ExitStack() as ending:
        yield Rows(daemon.socket, "mine", 16 << 10, ending)


def found(rows: Rows, keys: list[bytes]) -> int:
    """How many of the rows are loaded, each by a lookup of its own. The tier is up throughout."""
    count = 0
    for key in keys:
        count += rows.find([key]).chunks
        tier_status(rows.scheduler)  # raises TierDown
    return count


@pytest.mark.slow  # what it puts together is tested in test_strangers and test_record_tier
def test_one_archived_object_of_120_is_one_miss_and_is_stored_again(tmp_path: Path) -> None:
    keys = [sha256(b"%d" % i).digest()[:WIDTH] for i in range(120)]
    lost = keys[70]
    with (
        credentials(),
        closing(S3Server()) as server,
        running_daemon(
            tmp_path, "16MiB", tier=[server.url("archive")], skip_slow_loads="no"
        ) as made,
    ):
        with engine_of(made) as rows:
            rows.store(keys)
            wait_tier(rows.scheduler, flushed(120), "the flush")
        (name,) = (one for one in server.names("archive/records/") if lost.hex() in one)
        server.put(name, server.get(name), x_amz_storage_class="GLACIER")
        made.restart()
        with engine_of(made) as rows:
            assert found(rows, keys) == 119
            rows.store([lost])
            wait_tier(rows.scheduler, flushed(1), "the flush")
            assert eventually(lambda: tier_of(made).get("refused_records") == 1)
        made.restart()
        with engine_of(made) as rows:
            assert found(rows, keys) == 120
