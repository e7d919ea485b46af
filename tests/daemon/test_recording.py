"""``kvass serve --record``: a recording that is played again gives the hits and evictions that the
daemon gave, and tells nothing of what was asked."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import msgspec
import pytest

from kvass.cli.main import main
from kvass.client.parallel import ParallelStrategy
from kvass.daemon import recording
from kvass.daemon.notices import Notices
from kvass.daemon.recording import Recorder
from kvass.errors import ConfigError
from kvass.messages import (
    Commit,
    Granted,
    HandedOver,
    Lookup,
    LookupResult,
    Matched,
    Ping,
    Release,
    Reserve,
    ReserveItem,
)
from kvass.simulate.player import Player, Setting, recorded
from kvass.simulate.traces import Trace, read
from kvass.testing.daemon import running_daemon
from kvass.testing.fake_engine import FakeEngine, chunk_keys
from kvass.types import GroupLayout, RankLayout

CHUNK, WIDTH = 16, 16
DENSE = RankLayout((GroupLayout("full", 4, ("a", "b"), (1024, 1024)),))
TWO = RankLayout((*DENSE.groups, GroupLayout("full", 8, ("c",), (4096,))))
ALONE = ParallelStrategy()


def prompts(seed: int, count: int) -> list[list[int]]:
    random = Random(seed)
    stems = [[random.randrange(1000) for _ in range(CHUNK * 6)] for _ in range(5)]
    return [
        random.choice(stems)[: random.randrange(CHUNK * 6)]
        + [random.randrange(1000) for _ in range(random.randrange(CHUNK, CHUNK * 3))]
        for _ in range(count)
    ]


Evictions = list[tuple[int, int]]
"""After each request's lookup and store: how many rows were evicted so far, and the bytes of L1
that are used."""


def evictions(status: dict[str, Any]) -> tuple[int, int]:
    counters = status["counters"].items()
    evicted = sum(number for name, number in counters if name.startswith("evicted_"))
    return evicted, status["l1_used_bytes"]


def play(trace: Trace, l1_bytes: int, tails: bool = False, seen: Evictions | None = None) -> Player:
    models = {number: recorded(engine) for number, engine in trace.engines.items()}
    player = Player(Setting(l1_bytes, CHUNK, tails=tails), models)
    for request, _ in zip(trace.requests, player.play(trace), strict=True):
        if seen is not None:
            seen[len(seen) - (not request.looks_up) :] = [evictions(player.machine.status())]
    return player


def test_a_recording_gives_the_same_hits_and_evictions_as_the_daemon(tmp_path: Path) -> None:
    file, size = tmp_path / "run.jsonl", 1 << 20
    hits, evicted, simulated = list[int](), Evictions(), Evictions()
    with running_daemon(tmp_path, "1MiB", record=file) as daemon:
        with (
            FakeEngine(daemon.socket, ALONE, (DENSE,), chunk_tokens=CHUNK) as one,
            FakeEngine(daemon.socket, ALONE, (TWO,), chunk_tokens=CHUNK) as two,
        ):
            for i, prompt in enumerate(prompts(1, 80)):
                engine = (one, two)[i % 3 == 0]
                hits.append(engine.load(prompt) * CHUNK)
                engine.store(prompt)
                evicted.append(evictions(daemon.status()))
        daemon.stop()
    trace = read(file)
    assert trace.wrong == 0
    player = play(trace, size, seen=simulated)
    assert player.outcome.hits == hits
    assert sum(hits) > 0
    assert simulated == evicted
    assert player.outcome.evicted_rows == evicted[-1][0] > 0
    larger = play(trace, 4 * size).outcome
    assert larger.hit_tokens > player.outcome.hit_tokens, "negative control: the size matters"


def serve_in_blocks(engine: FakeEngine, prompt: list[int]) -> int:
    """Look up and store as an engine does whose hits end at blocks of 4 tokens; the tokens hit."""
    blocks = [key[:WIDTH] for key in chunk_keys(prompt, 4)]
    chunks, each = len(blocks) // 4, 4
    digests = b"".join(blocks[each - 1 :: each])

    def ask(chunk: int, again: bool = False) -> Matched:
        rest = b"".join(blocks[chunk * each : chunk * each + each - 1])
        lookup = Lookup(request="r", digests=digests[: chunk * WIDTH], width=WIDTH, again=again)
        found = engine.scheduler.call(msgspec.structs.replace(lookup, blocks=rest))
        assert isinstance(found, Matched)
        if found.lease:
            engine.ranks[0].client.post(Release(boot=found.boot, lease=found.lease, rank=0))
        return found

    found = ask(chunks)
    if found.chunks < chunks:
        again = ask(found.chunks, again=True)
        found = again if again.blocks else found
    item = ReserveItem(request="r", digests=digests, first=found.chunks)
    item.blocks = b"".join(blocks[found.chunks * each :])
    granted = engine.scheduler.call(Reserve(items=[item], width=WIDTH)) if item.blocks else None
    if isinstance(granted, Granted) and (number := granted.grants[0].reservation):
        engine.ranks[0].client.post(Commit(boot=granted.boot, reservation=number, rank=0))
    engine.ranks[0].client.call(Ping())
    return found.chunks * CHUNK + found.blocks * 4


def test_a_recording_with_tails_gives_the_same_hits_and_evictions(tmp_path: Path) -> None:
    file, size = tmp_path / "run.jsonl", 1 << 20
    with running_daemon(tmp_path, "1MiB", record=file) as daemon:
        with FakeEngine(daemon.socket, ALONE, (DENSE,), chunk_tokens=CHUNK) as engine:
            turns = [p + more for p in prompts(2, 30) for more in ([], [*range(20)], [*range(20)])]
            hits, evicted, simulated = list[int](), Evictions(), Evictions()
            for turn in turns:
                hits.append(serve_in_blocks(engine, turn))
                evicted.append(evictions(status := daemon.status()))
        daemon.stop()
    trace = read(file)
    player = play(trace, size, tails=True, seen=simulated)
    assert player.outcome.hits == hits
    assert any(hit % CHUNK for hit in hits)
    assert simulated == evicted
    assert player.outcome.evicted_rows == evicted[-1][0] > 0
    for name in ("tails_granted", "tails_replaced", "hit_blocks"):
        assert player.machine.status()["counters"][name] == status["counters"][name] > 0
    assert play(trace, size).outcome.hits != hits, "negative control: hits end with a chunk"
    assert play(trace, size // 4, tails=True).outcome.hit_tokens < sum(hits), "the size matters"


def test_a_lookup_that_is_repeated_is_recorded_once(tmp_path: Path) -> None:
    """When its request has got blocks: before what the request stores, or with its result."""
    file = tmp_path / "run.jsonl"
    with running_daemon(tmp_path, "1MiB", record=file) as daemon:
        with FakeEngine(daemon.socket, ALONE, (DENSE,), chunk_tokens=CHUNK) as engine:
            for request in "aabbc":
                digests = b"".join(chunk_keys(prompts(3, 1)[0], CHUNK))
                found = engine.scheduler.call(
                    Lookup(request=request, digests=digests, width=32, reported=True)
                )
                assert isinstance(found, Matched)
            item = ReserveItem(request="a", digests=digests)
            assert isinstance(engine.scheduler.call(Reserve(items=[item], width=32)), Granted)
            results = LookupResult("a"), LookupResult("b")
            engine.scheduler.post(HandedOver(boot=daemon.boot, results=results))
            engine.scheduler.call(Ping())
        daemon.stop()
    kinds = [json.loads(line)["kind"] for line in file.read_text().splitlines()]
    assert kinds == ["engine", "lookup", "store", "lookup"], "c got no blocks"


def test_a_recording_tells_no_hash_and_no_request_and_nobody_else_reads_it(tmp_path: Path) -> None:
    file, prompt = tmp_path / "run.jsonl", list(range(CHUNK * 4))
    with running_daemon(tmp_path, "1MiB", record=file) as daemon:
        with FakeEngine(daemon.socket, ALONE, (DENSE,), chunk_tokens=CHUNK) as engine:
            engine.store(prompt)
            engine.load(prompt)
        daemon.stop()
    text = file.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["kind"] for line in lines] == ["engine", "store", "lookup"]
    assert lines[1]["keys"] == lines[2]["keys"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for key in chunk_keys(prompt, CHUNK):
        for n in range(len(key) - 7):
            assert key[n : n + 8] not in _binary(lines[1]["keys"])


def test_what_the_daemon_refuses_is_not_recorded(tmp_path: Path) -> None:
    """It may say anything, also what cannot be recorded."""
    file, prompt = tmp_path / "run.jsonl", list(range(CHUNK * 4))
    with running_daemon(tmp_path, "1MiB", record=file) as daemon:
        with FakeEngine(daemon.socket, ALONE, (DENSE,), chunk_tokens=CHUNK) as engine:
            engine.load(prompt)
            for wrong in (
                Lookup(request="r", digests=bytes(64), width=0),
                Lookup(request="r", digests=bytes(64), width=16, first=9),
            ):
                assert engine.scheduler.submit(wrong)
            bad = ReserveItem(request="r", digests=bytes(64), first=-3)
            good = ReserveItem(request="good", digests=bytes(range(64)))
            assert engine.scheduler.submit(Reserve(items=[bad], width=16))
            assert engine.scheduler.submit(Reserve(items=[bad, good], width=16))
            engine.store(prompt)
        daemon.stop()
        assert daemon.log().count("refused: bad_value") == 2
        assert "Traceback" not in daemon.log()
    kinds = [json.loads(line)["kind"] for line in file.read_text().splitlines()]
    assert kinds == ["engine", "lookup", "store", "store"], "of the reserve its good item"


def test_small_messages_do_not_wait_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits is bounded in memory, not only in hashes."""
    writes, go_on = Event(), Event()

    def write(_: int, text: bytes) -> int:
        writes.set()
        go_on.wait()
        return len(text)

    monkeypatch.setattr(recording, "WAITING_BYTES", 100 << 10)
    monkeypatch.setattr(os, "write", write)
    namespace: Any = _Namespace()
    recorder = Recorder(str(tmp_path / "run.jsonl"), 1 << 20, Notices())
    recorder.take(time.monotonic(), namespace, Lookup(request="r", digests=b"", width=16))
    writes.wait()
    for _ in range(1000):
        recorder.take(time.monotonic(), namespace, Lookup(request="r", digests=b"", width=16))
    assert recorder._queue.qsize() <= 101
    go_on.set()
    recorder.close()


def _binary(text: str) -> bytes:
    import base64

    return base64.b64decode(text)


def test_a_daemon_that_starts_again_serves_and_leaves_the_recording(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    file.write_text("before")
    with running_daemon(tmp_path, "1MiB", record=file) as daemon:
        with FakeEngine(daemon.socket, ALONE, (DENSE,), chunk_tokens=CHUNK) as engine:
            assert engine.store(list(range(CHUNK))) == 1
        (note,) = daemon.status()["notes"]
        assert note == f"record {file}: it is there already, so nothing is recorded"
        daemon.stop()
        assert note in daemon.log()
    assert file.read_text() == "before"


def test_what_cannot_be_recorded_is_said_and_nobody_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.jsonl"
    namespace: Any = _Namespace()
    notices = Notices()
    recorder = Recorder(str(file), 400, notices)
    for _ in range(100):
        recorder.take(time.monotonic(), namespace, Lookup(request="r", digests=bytes(64), width=16))
    recorder.close()
    assert 0 < file.stat().st_size <= 400
    assert [r.getMessage() for r in caplog.records] == [
        f"the recording {file} has ended: it has reached --record-size"
    ]
    assert notices.fields()["notes"] == [caplog.records[0].getMessage()]
    assert len(read(file).asking) > 1
    with pytest.raises(ConfigError, match="No such file"):
        Recorder(str(tmp_path / "none" / "run.jsonl"), 400, notices)
    monkeypatch.setattr(recording, "WAITING_BYTES", -1)  # the thread is too slow
    slow = Recorder(str(tmp_path / "slow.jsonl"), 1 << 20, notices)
    slow.take(time.monotonic(), namespace, Lookup(request="r", digests=bytes(64), width=16))
    monkeypatch.undo()
    slow.take(time.monotonic(), namespace, Lookup(request="r", digests=bytes(64), width=16))
    slow.close()
    trace = read(tmp_path / "slow.jsonl")
    assert trace.why == ["line 1: 1 messages are missing before it"]


class _Namespace:
    id, chunk_tokens = 1, CHUNK
    classes = ()


def test_a_recording_with_wrong_lines_is_played_without_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.jsonl"
    group = '{"kind":"full","block_tokens":16,"row_bytes":4096}'
    engine = f'{{"kind":"engine","engine":1,"chunk_tokens":16,"groups":[{group}]}}'
    look = '{"kind":"lookup","engine":1,"t":1.0,"request":5,"keys":"AAAAAAAAAAA="}'
    store = look.replace("lookup", "store").replace('"keys"', '"first":0,"keys"')
    wrong = [
        "{",
        look.replace("1.0", "-1.0"),
        look.replace('"engine":1', '"engine":2'),
        look.replace("AAA=", "AA=="),
        store.replace('"first":0', '"first":1').replace('"request":5', '"request":6'),
        store.replace('"first":0', '"first":-1'),
        store.replace('"t"', '"groups":2,"t"'),
        store.replace('"t"', '"groups":-1,"t"'),
        store.replace('"t"', '"blocks":"AAAA","t"'),
        store.replace('"t"', f'"blocks":"{"A" * 32}","t"'),
    ]
    file.write_text("\n".join([engine, look, *wrong, look]))
    trace = read(file)
    assert len(trace.asking) == 2
    assert trace.wrong == len(wrong)
    assert main(["simulate", str(file), "--l1", "1MiB", "--chunk-tokens", "16"]) == 2
    for model, says in (
        ([], "engines\n"),
        (["--model", "llama-3-8b"], "engines, --model is ignored"),
    ):
        assert main(["simulate", str(file), "--l1", "1MiB", *model]) == 0
        assert f"KV cache of the recorded {says}" in capsys.readouterr().out
    for good, bad in (("4096", "0"), ("4096", str(1 << 62)), (':16,"g', f':{1 << 62},"g')):
        file.write_text(engine.replace(good, bad) + "\n" + look)
        assert main(["simulate", str(file)]) == 2
        assert "has no layout that can be" in capsys.readouterr().err
