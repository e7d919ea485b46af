"""Names of weights: equal for equal content wherever it lies, another for anything else."""

from __future__ import annotations

import hashlib
import os
import runpy
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvass.connectors.vllm import weight_files
from kvass.connectors.vllm.weight_files import LocalWeights
from kvass.engine import weights
from kvass.engine.identity import Indescribable
from kvass.testing.daemon import Daemon, running_daemon
from tests.support.vllm.ranks import StubModelEngine, until
from tests.support.vllm.scheduler import inert_reason, make_configs, read_setup, tiny_model

PROMPT = list(range(100))
FILES = {
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "params.json": b"{}",
    "model-1.safetensors": b"1234",
    "model-2.safetensors": b"5678",
    "model.safetensors.index.json": b"{}",
    "quantize_config.json": b"{}",
    "preprocessor_config.json": b"{}",
    "model.py": b"pass",
    "part/model.safetensors": b"9",
    "tokenizer.json": b"{}",
    "README.md": b"text",
}
COMMIT = "0123456789" * 4


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own, in which an engine starts when all its files are there."""
    monkeypatch.setattr(weights, "_digest_of", {})
    monkeypatch.setattr(weights, "started_ns", lambda: time.time_ns() + 10**9)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files of which the digest was computed."""
    found: list[str] = []
    real = weights._compute

    def compute(file: Path) -> str:
        found.append(file.name)
        return real(file)

    monkeypatch.setattr(weights, "_compute", compute)
    return found


def write(folder: Path, files: dict[str, bytes] = FILES) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def name(path: Path, load_format: str = "auto") -> str:
    return weights.name_of((LocalWeights(path, load_format),))


def write_later(file: Path, content: bytes, than_ns: int) -> None:
    """Write until the file's clock is past ``than_ns``: it ticks every few milliseconds."""
    while not file.exists() or file.stat().st_ctime_ns <= than_ns:
        file.write_bytes(content)


# ---------------------------------------------------------------- content


def test_copies_have_the_same_name_wherever_they_lie(tmp_path: Path) -> None:
    one, other = write(tmp_path / "one"), write(tmp_path / "elsewhere" / "other")
    os.utime(other / "model-1.safetensors", ns=(1, 1))
    for unread in ("README.md", "tokenizer.json"):
        (other / unread).write_bytes(b"[]")
    write(other, {".cache/x": b"", "original/model.safetensors": b"", "pytorch_model.bin": b""})
    assert name(one) == name(other)
    (tmp_path / "link").symlink_to(one)
    assert name(tmp_path / "link") == name(one)


COUNTING = [f for f in FILES if not f.startswith(("token", "READ"))]


@pytest.mark.parametrize("changed", COUNTING)
def test_one_byte_makes_another_name(tmp_path: Path, changed: str) -> None:
    before = name(write(tmp_path))
    state = (tmp_path / changed).stat()
    content = FILES[changed]
    write_later(tmp_path / changed, content[:-1] + b"!", state.st_ctime_ns)
    os.utime(tmp_path / changed, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert name(tmp_path) != before


def test_which_files_hold_what_counts(tmp_path: Path) -> None:
    before = name(write(tmp_path))
    found = {before}
    for change in ("added.safetensors", "model-3.safetensors"):
        (tmp_path / change).write_bytes(b"x")
        found.add(name(tmp_path))
        (tmp_path / change).unlink()
    (tmp_path / "model-1.safetensors").rename(tmp_path / "model-0.safetensors")
    found.add(name(tmp_path))
    assert len(found) == 4
    assert before not in (name(tmp_path, "pt"), name(tmp_path, "of-a-plugin"))


def test_a_loader_that_nobody_knows_may_read_any_file(tmp_path: Path) -> None:
    before = name(write(tmp_path), "of-a-plugin")
    (tmp_path / "README.md").write_bytes(b"other")
    assert name(tmp_path, "of-a-plugin") != before
    (tmp_path / "file.gguf").write_bytes(b"1")
    (tmp_path / "copy.gguf").write_bytes(b"1")
    assert name(tmp_path / "file.gguf", "gguf") == name(tmp_path / "copy.gguf", "gguf")


def test_a_folder_without_weights_has_no_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Indescribable, match=r"no weight files are in .*: set kvass\.model_id"):
        name(tmp_path)
    with pytest.raises(Indescribable, match="no weight files"):
        name(tmp_path / "gone")


# ---------------------------------------------------------------- what the Hub's client noted


def hub(cache: Path, files: dict[str, bytes] = FILES, repo: str = "some/model") -> Path:
    """A snapshot in the Hub's cache as its client makes it; large files' blobs by SHA-256."""
    top = cache / ("models--" + repo.replace("/", "--"))
    snapshot = top / "snapshots" / COMMIT
    (top / "blobs").mkdir(parents=True)
    for name, content in files.items():
        large = name.endswith(".safetensors")
        digest = hashlib.sha256(content).hexdigest() if large else hashlib.sha1(content).hexdigest()
        blob, link = top / "blobs" / digest, snapshot / name
        if not blob.exists():
            blob.write_bytes(content)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def test_what_the_hub_noted_is_not_read_and_equals_a_copy(
    tmp_path: Path, computed: list[str]
) -> None:
    noted = name(hub(tmp_path / "noted"))
    assert not [file for file in computed if file.endswith(".safetensors")]
    assert noted == name(write(tmp_path / "copy"))
    assert [file for file in computed if file.endswith(".safetensors")]


@pytest.mark.parametrize("place", ["snapshots/1", "mine"])
def test_a_folder_of_blobs_that_is_not_the_hubs_is_read(place: str, tmp_path: Path) -> None:
    """Each name is that of the Hub's client in one respect only."""
    wrong = "weights" if place.startswith("snapshots") else "0" * 64
    blobs = write(tmp_path / "blobs", {wrong: b"1234"})
    model = write(tmp_path / place, {n: FILES[n] for n in FILES if n != "model-1.safetensors"})
    (model / "model-1.safetensors").symlink_to(blobs / wrong)
    assert name(model) == name(write(tmp_path / "copy"))
    assert not weights._blob(model / "model-1.safetensors")


def test_a_blob_that_was_written_to_is_read(tmp_path: Path) -> None:
    copy = write(tmp_path / "copy", FILES | {"model-1.safetensors": b"12!4"})
    made = hub(tmp_path / "hub")
    file = made / "model-1.safetensors"
    write_later(file, b"12!4", max(file.lstat().st_ctime_ns, time.time_ns()))
    os.utime(file, ns=(1, 1))  # as a copy that keeps its times
    assert name(made) == name(copy)


# ---------------------------------------------------------------- changes


def started_now(monkeypatch: pytest.MonkeyPatch) -> int:
    now_ns = time.time_ns()
    monkeypatch.setattr(weights, "started_ns", lambda: now_ns)
    return now_ns


def test_files_written_since_the_engine_started_have_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    now_ns = started_now(monkeypatch)
    first = name(tmp_path)
    write_later(tmp_path / "README.md", b"nobody reads it", now_ns)
    write_later(tmp_path / ".cache", b"", now_ns)
    assert name(tmp_path) == first
    write_later(tmp_path / "model-1.safetensors", b"1234", now_ns)
    with pytest.raises(Indescribable, match=r"changed since this engine started.*restart"):
        name(tmp_path)


@pytest.mark.parametrize("how", ["link", "link to a link", "move", "file's link"])
def test_what_was_put_in_their_place_since_the_engine_started_has_no_name(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = write(tmp_path / "one"), write(tmp_path / "other")
    middle, link = tmp_path / "middle", tmp_path / "link"
    link.symlink_to(middle if how == "link to a link" else one)
    middle.symlink_to(one)
    asked = link if how.startswith("link") else one
    file = one / "model-1.safetensors"
    if how == "file's link":
        file.unlink()
        file.symlink_to(other / file.name)
    now_ns = started_now(monkeypatch)
    name(asked)
    changed = {"link": link, "link to a link": middle, "file's link": file}.get(how, one)
    while changed.lstat().st_ctime_ns <= now_ns:
        if changed is one:
            one.rename(tmp_path / "gone")
            other.rename(one)
            (tmp_path / "gone").rename(other)
        else:
            changed.unlink()
            changed.symlink_to(other / file.name if changed is file else other)
    with pytest.raises(Indescribable, match="changed since this engine started"):
        name(asked)


def test_files_written_while_they_are_read_have_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    real = weights._compute

    def compute(file: Path) -> str:
        digest = real(file)
        write_later(file, b"4321", file.stat().st_ctime_ns)
        return digest

    monkeypatch.setattr(weights, "_compute", compute)
    with pytest.raises(Indescribable, match="changed since"):
        name(tmp_path)


def test_when_a_process_started() -> None:
    fresh = runpy.run_path(weights.__file__)  # the fixture replaced what was imported
    boot_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    began_s = boot_s + ticks / os.sysconf("SC_CLK_TCK")
    assert fresh["started_ns"]() / 1e9 == pytest.approx(began_s + 0.1, abs=0.05)


# ---------------------------------------------------------------- who computes digests


def test_a_process_computes_a_digest_once(tmp_path: Path, computed: list[str]) -> None:
    """An engine's scheduler and its worker may be in one process, and name the same files."""
    first = name(write(tmp_path / "model"))
    assert sorted(computed) == sorted(Path(file).name for file in COUNTING)
    computed.clear()
    assert name(tmp_path / "model") == first
    assert computed == []
    file = tmp_path / "model" / "model-1.safetensors"
    write_later(file, b"4321", file.stat().st_ctime_ns)
    assert name(tmp_path / "model") != first
    assert computed == [file.name]


def test_who_needs_a_digest_that_is_being_computed_waits_for_it(
    tmp_path: Path, computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path) / "model-1.safetensors"
    inner, begun, go = weights._compute, threading.Event(), threading.Event()

    def compute(file: Path) -> str:
        begun.set()
        assert go.wait(30)
        return inner(file)

    monkeypatch.setattr(weights, "_compute", compute)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(weights._sha256, file)
        assert begun.wait(30)
        second = threads.submit(weights._sha256, file)
        time.sleep(0.05)  # it finds that somebody computes; if it comes later it finds the digest
        go.set()
        assert first.result(30) == second.result(30) == hashlib.sha256(b"1234").hexdigest()
    assert computed == [file.name]


def test_no_file_in_the_users_cache_folder_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may write there: what a digest is of would be their word."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = write(tmp_path / "model")
    for file in model.rglob("*.*"):
        entry = hashlib.sha256(repr(weights._key(file.stat())).encode()).hexdigest()
        write(tmp_path / "cache/kvass/weights", {entry: b"0" * 64})
    assert name(model) == name(write(tmp_path / "copy"))


def test_threads_share_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, both = weights._compute, threading.Barrier(2, timeout=30)
    files = {"a.safetensors": b"12", "b.safetensors": b"3"}

    def compute(file: Path) -> str:
        both.wait()  # with one thread nobody else would come
        return real(file)

    one_by_one = name(write(tmp_path / "one", files))
    monkeypatch.setattr(weights, "_compute", compute)
    sources = (LocalWeights(write(tmp_path / "two", files), "auto"),)
    assert weights.name_of(sources, threads=2) == one_by_one


def test_what_one_of_the_threads_cannot_read_has_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = weights._compute

    def compute(file: Path) -> str:
        if file.name == "model-2.safetensors":
            raise PermissionError(file)
        return real(file)

    monkeypatch.setattr(weights, "_compute", compute)
    sources = (LocalWeights(write(tmp_path), "auto"),)
    with pytest.raises(Indescribable, match="cannot be read"):
        weights.name_of(sources, threads=3)
    monkeypatch.setattr(weights, "_compute", real)
    assert weights.name_of(sources, threads=3), "a failure is not remembered"


@pytest.mark.parametrize(
    ("cores", "processes", "threads"), [(1, 1, 1), (4, 1, 4), (64, 1, 8), (64, 16, 4), (4, 9, 1)]
)
def test_the_processes_of_an_engine_share_the_cores(
    cores: int, processes: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(weights, "name_of", lambda _, threads: str(threads))
    assert weights.begin((), processes).result(30) == str(threads)


# ---------------------------------------------------------------- where weights are


def config(**fields: Any) -> Any:
    """As much of vLLM's configuration as says where weights are."""
    model: dict[str, Any] = {"model": "some/model", "model_weights": "", "revision": None}
    model["hf_config"] = SimpleNamespace()
    load = {"load_format": "auto", "download_dir": fields.pop("download_dir", None)}
    load["load_format"] = fields.pop("load_format", "auto")
    draft = fields.pop("draft", None)
    return SimpleNamespace(
        model_config=SimpleNamespace(**(model | fields)),
        load_config=SimpleNamespace(**load),
        speculative_config=draft
        and SimpleNamespace(draft_model_config=draft, draft_load_config=None),
    )


def test_a_name_that_the_user_gives_needs_no_file() -> None:
    given = weight_files.sources(config(model="/nowhere"), "mine")
    assert given == ("id:mine",)
    assert weights.name_of(given) == '["id:mine"]'


def test_weights_in_an_object_store_are_known_by_their_address(tmp_path: Path) -> None:
    """vLLM fetches the small files anew at each start, to a folder that is named by the address."""
    found = set()
    for uri in ("s3://bucket/one", "gs://bucket/two"):
        made = config(model=str(write(tmp_path)), model_weights=uri)
        first = weights.name_of(weight_files.sources(made, ""))
        write_later(tmp_path / "config.json", b"{}", time.time_ns())
        assert weights.name_of(weight_files.sources(made, "")) == first
        found.add(first)
    assert len(found) == 2


class Resolved(str):
    """A revision as vLLM resolves it at start."""

    resolved = COMMIT


@pytest.mark.parametrize("revision", [Resolved("main"), COMMIT, None])
def test_a_model_of_the_hub_is_its_snapshot(tmp_path: Path, revision: str | None) -> None:
    snapshot = hub(tmp_path / "hub")
    write(snapshot.parent.parent, {"refs/main": COMMIT.encode()})
    made = config(revision=revision, download_dir=str(tmp_path / "hub"))
    assert weight_files.sources(made, "") == (LocalWeights(snapshot, "auto"),)
    assert name(snapshot) == name(write(tmp_path / "copy"))


def test_a_model_of_the_hub_without_a_known_commit_has_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = hub(tmp_path)
    note = snapshot.parent.parent / "refs" / "main"
    made = config(download_dir=str(tmp_path))
    with pytest.raises(Indescribable, match="which commit of some/model was loaded is not known"):
        weight_files.sources(made, "")
    note.parent.mkdir()
    write_later(note, COMMIT.encode(), started_now(monkeypatch))
    with pytest.raises(Indescribable, match=r"commit as the revision, or set kvass\.model_id"):
        weight_files.sources(made, "")
    made.model_config.hf_config._commit_hash = COMMIT
    assert weight_files.sources(made, "") == (LocalWeights(snapshot, "auto"),)
    other = config(model=str(tmp_path), model_weights="some/other", revision=COMMIT)
    with pytest.raises(Indescribable, match="which weights of some/other were loaded"):
        weight_files.sources(other, "")
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    with pytest.raises(Indescribable, match="which weights of some/model were loaded is not known"):
        weight_files.sources(made, "")
    monkeypatch.delenv("VLLM_USE_MODELSCOPE")
    made = config(revision="f" * 40, download_dir=str(tmp_path))
    with pytest.raises(Indescribable, match="are not in"):
        weight_files.sources(made, "")


def test_the_drafters_weights_and_configuration_count(tmp_path: Path) -> None:
    model = write(tmp_path / "model")
    changes: tuple[dict[str, bytes], ...]
    changes = ({}, {"a.safetensors": b"1"}, {"config.json": b'{"rope_theta": 1}'})
    drafters = [write(tmp_path / f"drafter {i}", FILES | new) for i, new in enumerate(changes)]
    made = [config(model=str(model), draft=config(model=str(one)).model_config) for one in drafters]
    found = [
        weights.name_of(weight_files.sources(one, "")) for one in [config(model=str(model)), *made]
    ]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("load_format", ["ipc_cache", "tensorizer"])
def test_weights_that_come_from_elsewhere_have_no_name(load_format: str) -> None:
    with pytest.raises(Indescribable, match=r"set kvass\.model_id"):
        weight_files.sources(config(load_format=load_format), "")
    assert weight_files.sources(config(load_format="dummy"), "") == ("dummy",)


# ---------------------------------------------------------------- engines


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Of any folder, vLLM reads the configuration only: there is no engine here."""
    return copy(tiny_model(), tmp_path / "model")


def copy(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to, copy_function=shutil.copyfile)
    return to


@pytest.fixture
def start() -> Iterator[Callable[..., StubModelEngine]]:
    made: list[StubModelEngine] = []

    def start_one(daemon: Daemon, model: Path, **options: Any) -> StubModelEngine:
        made.append(StubModelEngine(daemon.socket, daemon, model=model, **options))
        return made[-1]

    yield start_one
    for one in made:
        one.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is read before it is set; an engine that starts waits for a moment only."""
    monkeypatch.setattr(weights, "READY_S", 0.01)
    opened, real = threading.Event(), weights._compute

    def compute(file: Path) -> str:
        assert opened.wait(30)
        return real(file)

    monkeypatch.setattr(weights, "_compute", compute)
    yield opened
    opened.set()


@pytest.fixture
def unread(
    tmp_path: Path, model: Path, start: Callable[..., StubModelEngine], gate: threading.Event
) -> Iterator[tuple[Daemon, StubModelEngine]]:
    """A daemon, and an engine whose weights are not read before ``gate`` is set."""
    with running_daemon(tmp_path) as daemon:
        yield daemon, start(daemon, model)


def until_nobody_reads() -> None:
    def over() -> bool:
        return all(thread.name != "kvass-weights" for thread in threading.enumerate())

    until(over, "the end of the threads that name weights")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = caplog.get_records("setup") + caplog.records
    return [one.getMessage() for one in records if one.name == "kvass.engine"]


def test_an_engine_runs_uncached_until_its_weights_are_read(
    unread: tuple[Daemon, StubModelEngine], gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    daemon, one = unread
    one.generate("early", PROMPT)
    assert one.world.connector.reset_cache() is True
    assert daemon.status()["sessions"] == 1, "that which asks"
    assert said(caplog) == [
        "the weight files are being read to name them by content; uncached until then"
    ]
    gate.set()
    one.wait_connected()
    assert said(caplog)[1:] == ["the weight files are read: caching begins"]
    until(lambda: one.step() and one.client.answering, "the clear that is owed")
    one.generate("late", range(200, 300))
    assert daemon.status()["rows"] == 3


def test_an_engine_whose_weights_cannot_be_read_says_so_once(
    unread: tuple[Daemon, StubModelEngine],
    model: Path,
    gate: threading.Event,
    caplog: pytest.LogCaptureFixture,
) -> None:
    daemon, one = unread
    (model / "model.safetensors").unlink()
    gate.set()
    until_nobody_reads()
    one.generate("a", PROMPT)
    assert daemon.status()["rows"] == 0
    assert sorted(text.partition(":")[0] for text in said(caplog)[1:]) == [
        "kvass is off in this worker",
        "kvass is off, the engine runs uncached",
    ]


def test_an_engine_may_end_before_its_weights_are_read(
    tmp_path: Path, model: Path, gate: threading.Event
) -> None:
    with running_daemon(tmp_path) as daemon:
        StubModelEngine(daemon.socket, daemon, model=model).close()
        gate.set()
        until_nobody_reads()
        assert daemon.status()["sessions"] == 1


def test_an_engine_whose_weights_changed_is_inert(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, caches = make_configs(model=model)
    read_setup(config, caches)
    monkeypatch.setattr(weights, "started_ns", lambda: 1)
    assert "restart the engine" in inert_reason(config, caches)
    config.kv_transfer_config.kv_connector_extra_config["kvass.model_id"] = "mine"
    named = read_setup(config, caches)
    assert named.weights.result() == '["id:mine"]'
    assert named.register().model == "mine"
