"""``kvass export`` and ``kvass import`` between two real daemons, with fake engines."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvass.cli.main import main
from kvass.client import carrying
from kvass.client.carried_file import Reader, Writer
from kvass.client.carrying import RowClient
from kvass.client.client import Client
from kvass.client.lookups import Match
from kvass.client.parallel import ParallelStrategy
from kvass.testing.daemon import Daemon, running_daemon
from kvass.testing.fake_engine import FakeEngine, spread
from kvass.tiers import codec
from kvass.types import GroupLayout, RankLayout, session_tag
from tests.support.waiting import eventually

FULL = GroupLayout("full", 4, ("l0", "l1"), (64, 96))
WINDOW = GroupLayout("sliding_window", 4, ("w0", "w1"), (64, 64), 20)
STATE = GroupLayout("state", 16, ("s0", "s1"), (512, 512))
KINDS = {
    "full": RankLayout((FULL,)),
    "windows": RankLayout((FULL, WINDOW)),
    "states": RankLayout((FULL, STATE)),
}
ONE, MANY = ParallelStrategy(), ParallelStrategy(tp=4, pp=2, replicas=2)
PROMPT = range(16 * 6 + 3)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("source")
    (folder / "tier").mkdir()
    tiers = [f"disk:{folder / 'tier'}?capacity=64MiB"]
    with running_daemon(folder, "32MiB", tier=tiers) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running_daemon(tmp_path_factory.mktemp("target"), "32MiB") as daemon:
        yield daemon


@pytest.fixture
def do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, bytes]]:
    """Runs a command. Gives its status, its text and what it wrote to standard output."""

    def one(daemon: Daemon, *words: str, data: bytes = b"") -> tuple[int, str, bytes]:
        out = io.TextIOWrapper(io.BytesIO(), write_through=True)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
            patch.setattr(sys, "stdout", out)
            status = main([*words, "--socket", daemon.socket])
        written = out.buffer.getvalue()
        text = capsys.readouterr().err
        return status, (text if words[0] == "export" else text + written.decode()), written

    return one


def engine_of(
    daemon: Daemon,
    name: str,
    world: ParallelStrategy = ONE,
    kind: str = "full",
    blocks: int = 512,
    **more: str,
) -> FakeEngine:
    layouts = spread(world, KINDS[kind])
    fields = {"model": name, "kind": kind, **more}
    engine = FakeEngine(daemon.socket, world, layouts, identity=fields, blocks=blocks)
    engine.session = session_tag("s")
    return engine


def carried(source: Daemon, do: Any, name: str, *words: str, **more: Any) -> bytes:
    """The file of a session with ``PROMPT`` of the engine ``name``."""
    with engine_of(source, name, **more) as engine:
        engine.session = session_tag(name)
        assert engine.store(PROMPT) == 6
    status, text, file = do(source, "export", "--session", name, *words)
    assert (status, text.count("\n")) == (0, 1), text
    assert f"{name}: 96 of 96 tokens of its last prompt" in text
    return bytes(file)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [ONE, MANY], ids=["one", "many"])
def test_another_daemons_engine_loads_what_was_carried(
    source: Daemon, target: Daemon, do: Any, world: ParallelStrategy, kind: str
) -> None:
    name = f"{kind} {world.ranks}"
    file = carried(source, do, name, world=world, kind=kind)
    with engine_of(target, name, world, kind) as engine:
        assert engine.load(PROMPT) == 0
        status, text, _ = do(target, "import", data=file)
        assert (status, text.startswith(f"{name}: 96 of 96 tokens can be hit (")) == (0, True), text
        assert engine.load(PROMPT) == 6
        assert engine.verify() > 0
        assert engine.load(range(16 * 5)) == 5, "a shorter prompt hits, too"
        assert engine.verify() > 0
        rows = target.status()["rows"]
        again = do(target, "import", data=file)[1]
        assert "rows; " in again
        assert "were here)" in again
        assert target.status()["rows"] == rows
        assert "96 of 96 tokens" in do(target, "session", name)[1], "it is a session here now"
    target.wait_until(leases=0, reservations=0, pins=0)
    source.wait_until(leases=0, reservations=0, pins=0)


def test_rows_that_left_l1_come_from_a_tier(source: Daemon, target: Daemon, do: Any) -> None:
    with engine_of(source, "tier") as engine:
        engine.session = session_tag("tier")
        assert engine.store(PROMPT) == 6
    assert eventually(lambda: flushed(source.status()))
    assert do(source, "clear", "--tenant", "default")[0] == 0
    status, text, file = do(source, "export", "--session", "tier")
    assert (status, "96 of 96 tokens" in text) == (0, True), text
    with engine_of(target, "tier") as engine:
        assert do(target, "import", data=file)[0] == 0
        assert engine.load(PROMPT) == 6
        assert engine.verify() > 0


def flushed(status: dict[str, Any]) -> bool:
    (tier,) = status["tiers"]
    return not tier["flush_queue_rows"] and not tier["storing_bytes"]


def test_another_model_is_refused_with_the_field_that_differs(
    source: Daemon, target: Daemon, do: Any
) -> None:
    file = carried(source, do, "mine", dtype="bfloat16")
    with engine_of(target, "mine", dtype="float16") as engine:
        rows = target.status()["rows"]
        status, text, _ = do(target, "import", data=file)
        assert (status, text.count("\n")) == (1, 1)
        assert "differs in dtype (file: bfloat16; here: float16); give --ahead" in text
        assert target.status()["rows"] == rows
        assert do(target, "import", "--ahead", data=file)[0] == 0
        assert engine.load(PROMPT) == 0
    with engine_of(target, "mine", dtype="bfloat16") as engine:
        assert engine.load(PROMPT) == 6
        assert engine.verify() > 0


def records(file: bytes) -> list[int]:
    """Where the first line of a file ends, and each record."""
    at = file.index(b"\n") + 1
    ends = [at]
    while at < len(file):
        header = codec.decode_header(file[at:])
        assert header is not None
        at += codec.header_bytes(header) + sum(header.lengths)
        ends.append(at)
    return ends


def test_a_file_that_was_cut_gives_its_whole_records_alone(
    source: Daemon, target: Daemon, do: Any
) -> None:
    file = carried(source, do, "cut")
    ends = records(file)
    assert len(ends) == 1 + 1 + 6 + 1, "the first line, what it is, rows, the end"
    with engine_of(target, "cut") as engine:
        for number, end in enumerate(ends):
            for cut in (end - 1, end, end + 1):
                if 0 <= cut < len(file):
                    engine.scheduler.clear(10)
                    status, text, _ = do(target, "import", data=file[:cut])
                    assert (status, text.count("\n")) == (1, 1), text
                    whole = max(0, number - 1 - (cut < end))
                    assert "it was cut" in text or cut < ends[0], text
                    assert engine.load(PROMPT) == whole, (cut, text)
                    assert f"the {whole} rows before" in text or not whole
                    engine.verify()

        engine.scheduler.clear(10)
        status, text, _ = do(target, "import", data=file[: ends[3]] + file[ends[4] :])
        assert (status, "has 5 rows and says that it has 6" in text) == (1, True), text
        assert engine.load(PROMPT) == 2, "a record was taken out"
        engine.verify()


@pytest.mark.parametrize("keys", [False, True], ids=["plain", "encrypted"])
def test_no_changed_byte_is_served(
    source: Daemon, target: Daemon, do: Any, keys: bool, tmp_path: Path
) -> None:
    option = ["--key-file", str(key_file(tmp_path / "keys", "ab"))] if keys else []
    name = f"flipped {keys}"
    file = carried(source, do, name, *option)
    ends = records(file)
    with engine_of(target, name) as engine:
        for at in [*range(14), *range(14, len(file), len(file) // 50 + 1), len(file) - 1]:
            changed = bytearray(file)
            changed[at] ^= 4
            engine.scheduler.clear(10)
            status, text, _ = do(target, "import", *option, data=bytes(changed))
            assert (status, text.count("\n")) == (1, 1), (at, text)
            assert engine.load(PROMPT) == min(6, sum(end <= at for end in ends[2:])), (at, text)
            engine.verify()


def test_negative_control_without_the_check_a_changed_byte_is_served(
    source: Daemon, target: Daemon, do: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = bytearray(carried(source, do, "unchecked"))
    file[records(bytes(file))[1] + 200] ^= 4  # in the first row
    with engine_of(target, "unchecked") as engine:
        assert do(target, "import", data=bytes(file))[0] == 1
        assert engine.load(PROMPT) == 0
        right = codec.payload_checksum

        def unchecked(shards: Any) -> Any:
            return Anything(right(shards))

        monkeypatch.setattr(codec, "payload_checksum", unchecked)
        assert do(target, "import", data=bytes(file))[0] == 0
        assert engine.load(PROMPT) == 6
        with pytest.raises(Exception, match="page"):
            engine.verify()


class Anything(int):
    """Equal to each number."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


def key_file(path: Path, *keys: str) -> Path:
    path.write_text("".join(f"{key * 32}\n" for key in keys))
    path.chmod(0o600)
    return path


def test_an_encrypted_file_says_nothing_and_needs_its_key(
    source: Daemon, target: Daemon, do: Any, tmp_path: Path
) -> None:
    right = key_file(tmp_path / "right", "ab")
    file = carried(source, do, "secret", "--key-file", str(right))
    plain = carried(source, do, "secret plain")
    for text in (b"secret", b"kvass carry: what", b"full"):
        assert text not in file
        assert text in plain
    wrong, rotated = key_file(tmp_path / "w", "cd"), key_file(tmp_path / "r", "cd", "ab")
    with engine_of(target, "secret") as engine:
        for option, why in [
            ([], "the file is encrypted: give the --key-file"),
            (["--key-file", str(wrong)], "with a key that is not in --key-file"),
        ]:
            status, text, _ = do(target, "import", *option, data=file)
            assert (status, text.count("\n"), why in text) == (1, 1, True), text
            assert engine.load(PROMPT) == 0
        status, text, _ = do(target, "import", "--key-file", str(right), data=plain)
        assert (status, "the file is not encrypted" in text) == (1, True)
        assert do(target, "import", "--key-file", str(rotated), data=file)[0] == 0
        assert engine.load(PROMPT) == 6
        assert engine.verify() > 0


def test_what_cannot_be_carried_is_one_line(source: Daemon, target: Daemon, do: Any) -> None:
    assert "the daemon knows no prompt of it" in do(source, "export", "--session", "nobody")[1]
    assert do(source, "export", "--session", "")[0] == 2
    for data, why in [(b"", "no file that"), (b"kvass carry 2\n", "another version of kvass")]:
        status, text, _ = do(target, "import", data=data)
        assert (status, text.count("\n"), why in text) == (1, 1, True), text
    with engine_of(source, "private") as engine:
        engine.session = session_tag("private")
        engine.scheduler.new_generation()
        while engine.scheduler.resetting:
            engine.scheduler.new_step()
        assert engine.store(PROMPT) == 6
        status, text, file = do(source, "export", "--session", "private")
        assert (status, file, "may have replaced weights in place" in text) == (1, b"", True)


def forged(file: bytes, **fields: Any) -> bytes:
    """A right file that says something else of its engine."""
    what = Reader(io.BytesIO(file), None).what
    engine = msgspec.structs.replace(what.engine, **fields)
    out = io.BytesIO()
    Writer(out, msgspec.structs.replace(what, engine=engine), None).end()
    return out.getvalue()


def test_a_file_that_contradicts_itself_stores_nothing(
    source: Daemon, target: Daemon, do: Any
) -> None:
    unusable = "what it says of its engine cannot be used"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"identity": {"model": "another"}}, "its fields and its namespace contradict each other"),
        ({"world_size": 2}, unusable),
        ({"shards": (0,) * 4096}, unusable),
        ({"layouts": ()}, unusable),
        ({"layouts": (b"x",)}, unusable),
        ({"chunk_tokens": 0}, "chunk_tokens"),
    ]
    file = carried(source, do, "forged")
    rows = target.status()["rows"]
    for fields, why in wrong:
        status, text, _ = do(target, "import", "--ahead", data=forged(file, **fields))
        assert (status, text.count("\n"), why in text) == (1, 1, True), text
    assert target.status()["rows"] == rows


def test_what_l1_has_no_room_for_is_said(
    source: Daemon, do: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carrying, "TRIES", 2)
    prompt = range(16 * 400)
    with engine_of(source, "large", blocks=2048) as engine:
        assert engine.store(prompt) == 400
        file = do(source, "export", "--session", "s")[2]
    with (
        running_daemon(tmp_path, "1MiB") as small,
        engine_of(small, "large", blocks=2048) as engine,
    ):
        status, text, _ = do(small, "import", data=file)
        assert (status, text.count("\n"), "has no room in L1" in text) == (1, 1, True), text
        assert 0 < engine.load(prompt) < 400
        assert engine.verify() > 0
        small.wait_until(leases=0, reservations=0, pins=0)


def test_a_daemon_without_keys_of_sessions_is_said(
    source: Daemon, do: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried(source, do, "older")
    right = Client.ask_session

    def older(self: Client, *words: Any, keys: bool = False, **more: Any) -> Any:
        return right(self, *words, **more)

    monkeypatch.setattr(Client, "ask_session", older)
    status, text, file = do(source, "export", "--session", "older")
    assert (status, file, "the daemon is older than this command" in text) == (1, b"", True)


@pytest.mark.parametrize("lost", [3, 1 << 30])
def test_a_row_whose_lease_ended_is_read_again_under_another(
    source: Daemon, target: Daemon, do: Any, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    name, asked = f"lost {lost}", 0
    carried(source, do, name)
    right = RowClient.still_there

    def still_there(self: RowClient, match: Match) -> bool:
        nonlocal asked
        asked += 1
        return right(self, match) and asked % lost != 0 and lost < 100

    monkeypatch.setattr(RowClient, "still_there", still_there)
    status, text, file = do(source, "export", "--session", name)
    if lost == 3:
        assert (status, len(records(file))) == (0, 1 + 1 + 6 + 1), text
        assert do(target, "import", "--ahead", data=file)[0] == 0
    else:
        assert (status, text.count("\n"), len(records(file))) == (1, 1, 2), text
        assert "the file is not whole" in text
    source.wait_until(leases=0, pins=0)
