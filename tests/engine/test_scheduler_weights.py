"""Names of weights: equal for equal content wherever it lies, another for anything else."""

from __future__ import annotations

import hashlib
import os
import re
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
import vllm

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
    "part/config.json": b"{}",
    "tekken.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
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
    for unread in ("README.md", "tokenizer.json", "tokenizer_config.json"):
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
    assert before not in (name(tmp_path, "pt"), name(tmp_path, "sharded_state"))


def test_of_some_load_formats_any_file_counts(tmp_path: Path) -> None:
    before = name(write(tmp_path), "sharded_state")
    (tmp_path / "README.md").write_bytes(b"other")
    assert name(tmp_path, "sharded_state") != before
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
    monkeypatch.setattr(weights, "name_of", lambda _, threads, since_ns: str(threads))
    assert weights.begin((), processes).result(30) == str(threads)


# ---------------------------------------------------------------- where weights are


MODEL: dict[str, Any] = {
    "model": "some/model",
    "model_weights": "",
    "revision": None,
    "hf_config_path": None,
    "tokenizer": "some/model",
    "architecture": "LlamaForCausalLM",
    "multimodal_config": None,
    "trust_remote_code": False,
    "code_revision": None,
}


def config(**fields: Any) -> Any:
    """As much of vLLM's configuration as says where weights are."""
    parts = {"hf_config": SimpleNamespace(), "hf_text_config": SimpleNamespace()}
    load = {"load_format": "auto", "download_dir": fields.pop("download_dir", None)}
    load["load_format"] = fields.pop("load_format", "auto")
    draft = fields.pop("draft", None)
    return SimpleNamespace(
        model_config=SimpleNamespace(**(MODEL | parts | fields)),
        load_config=SimpleNamespace(**load),
        speculative_config=draft
        and SimpleNamespace(draft_model_config=draft, draft_load_config=None),
    )


def test_a_name_that_the_user_gives_needs_no_file() -> None:
    given = weight_files.sources(config(model="/nowhere"), "mine")
    assert given == ("id:mine",)
    assert weights.name_of(given) == '["id:mine"]'


@pytest.mark.parametrize("uri", ["s3://bucket/one", "gs://bucket/two"])
def test_an_address_is_no_name(uri: str, tmp_path: Path) -> None:
    """The objects there may be replaced, and another store may have the same address."""
    made = config(model=str(write(tmp_path)), model_weights=uri)
    with pytest.raises(Indescribable, match=r"known, only its address: set kvass\.model_id"):
        weight_files.sources(made, "")


class Resolved(str):
    """A revision as vLLM resolves it at start."""

    resolved = COMMIT


@pytest.mark.parametrize("revision", [Resolved("main"), COMMIT, None])
def test_a_model_of_the_hub_is_its_snapshot(tmp_path: Path, revision: str | None) -> None:
    snapshot = hub(tmp_path / "hub")
    write(snapshot.parent.parent, {"refs/main": COMMIT.encode()})
    made = config(revision=revision, download_dir=str(tmp_path / "hub"))
    assert LocalWeights(snapshot, "auto") in weight_files.sources(made, "")
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
    assert LocalWeights(snapshot, "auto") in weight_files.sources(made, "")
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


@pytest.mark.parametrize("load_format", ["ipc_cache", "tensorizer", "npcache", "of-a-plugin"])
def test_weights_that_come_from_elsewhere_have_no_name(load_format: str, tmp_path: Path) -> None:
    """``npcache`` reads a copy in ``np`` that vLLM never renews."""
    made = config(load_format=load_format, model=str(write(tmp_path)))
    with pytest.raises(Indescribable, match=r"set kvass\.model_id"):
        weight_files.sources(made, "")
    assert weight_files.sources(config(load_format="dummy"), "") == ("dummy",)


def test_a_plugins_loader_in_place_of_vllms_has_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor import model_loader

    made = config(model=str(write(tmp_path)))
    assert weight_files.sources(made, "")
    monkeypatch.setitem(model_loader._LOAD_FORMAT_TO_MODEL_LOADER, "auto", Resolved)
    with pytest.raises(Indescribable, match="what load format auto reads is not known"):
        weight_files.sources(made, "")


# ---------------------------------------------------------------- what is not in the model's folder


def names_of(made: Any) -> str:
    return weights.name_of(weight_files.sources(made, ""))


def test_a_part_from_another_repository_counts(tmp_path: Path) -> None:
    """Ultravox's text model and audio tower, in a folder or on the Hub."""
    model, tower = write(tmp_path / "model"), write(tmp_path / "tower")
    snapshot = hub(tmp_path / "hub", repo="some/text")
    parts = SimpleNamespace(audio_model_id=str(tower), text_model_id="some/text")
    made = config(model=str(model), hf_config=parts, download_dir=str(tmp_path / "hub"))
    with pytest.raises(Indescribable, match="which commit of some/text was loaded is not known"):
        weight_files.sources(made, "")
    write(snapshot.parent.parent, {"refs/main": COMMIT.encode()})
    assert LocalWeights(snapshot, "auto") in weight_files.sources(made, "")
    found = {names_of(made), names_of(config(model=str(model)))}
    (tower / "model-1.safetensors").write_bytes(b"another tower")
    found.add(names_of(made))
    (snapshot / "model-1.safetensors").unlink()
    (snapshot / "model-1.safetensors").write_bytes(b"another text model")
    found.add(names_of(made))
    assert len(found) == 4


def test_vllms_own_configuration_says_what_its_parts_are(tmp_path: Path, model: Path) -> None:
    from vllm.transformers_utils.configs.ultravox import UltravoxConfig

    write(model, {"model.safetensors": b"1"})
    tower = write(tmp_path / "tower", {"config.json": b'{"model_type": "whisper"}', "a.bin": b"1"})
    parts = UltravoxConfig(audio_model_id=str(tower), text_model_id=str(model))
    found = weight_files.sources(config(model=str(model), hf_config=parts), "")
    assert {one.root for one in found if not isinstance(one, str)} == {model, tower}
    assert all(hasattr(parts, name) for name in weight_files.INNER_MODELS.values())


def test_no_other_model_of_vllm_reads_a_second_repository() -> None:
    """If this fails: name what the model reads (``weight_files.INNER_MODELS``), or give it no
    name."""
    named = r"(?:DefaultModelLoader\.Source|hf_hub_download|snapshot_download)\(\s*\w*=?([\w.]+)"
    files = r"get_hf_file_(?:bytes|to_dict)\(\s*[^,()]+,\s*([\w.]+),"
    found = set()
    for folder in ("model_executor/models", "models", "v1/spec_decode"):
        for file in (Path(vllm.__file__).parent / folder).rglob("*.py"):
            found |= set(re.findall(f"{named}|{files}", file.read_text()))
    found = {name for names in found for name in names if name}
    own = {
        name for name in found if re.fullmatch(r"(\w+\.)*\w*model_config\.model|model|path", name)
    }
    assert own
    assert found - own == {f"config.{name}" for name in weight_files.INNER_MODELS}


def test_code_from_another_repository_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    model = write(tmp_path / "model")
    runs = {"trust_remote_code": True, "architecture": "TransformersForCausalLM"}
    parts = SimpleNamespace(auto_map={"AutoModel": "some/code--modeling.Model"})
    made = config(model=str(model), hf_config=parts, **runs)
    plain = names_of(made)  # nothing of it was fetched, so nothing was run
    snapshot = hub(tmp_path / "hub", {"modeling.py": b"pass"}, "some/code")
    with pytest.raises(Indescribable, match="which commit of some/code"):
        names_of(made)
    write(snapshot.parent.parent, {"refs/main": COMMIT.encode()})
    found = [names_of(made)]
    (snapshot / "modeling.py").unlink()
    (snapshot / "modeling.py").write_text("raise")
    found.append(names_of(made))
    assert len({plain, *found}) == 3
    for less in ({"trust_remote_code": False}, {"architecture": "LlamaForCausalLM"}):
        assert names_of(config(model=str(model), hf_config=parts, **(runs | less))) == plain
    maps = b'{"auto_map": {"AutoTokenizer": "a--b.C", "AutoProcessor": "some/code--b.C"}}'
    images = config(model=str(write(model, {"processor_config.json": maps})), **runs)
    code = weight_files.LocalFiles(snapshot, ("*.py",))
    assert code in weight_files.sources(images, "")
    snapshot = hub(tmp_path / "hub")
    write(snapshot.parent.parent, {"refs/main": COMMIT.encode()})
    own, code = config(revision=COMMIT, **runs), weight_files.LocalFiles(snapshot, ("*.py",))
    assert code not in weight_files.sources(own, "")
    own.model_config.code_revision = "main"
    assert code in weight_files.sources(own, ""), "its own, at another revision"


def test_a_configuration_from_another_folder_counts(tmp_path: Path) -> None:
    """A field of the identity has not all of it."""
    model, other = write(tmp_path / "model"), write(tmp_path / "other", {"config.json": b"{}"})
    made = config(model=str(model), hf_config_path=str(other))
    before = names_of(made)
    (other / "config.json").write_bytes(b'{"projector_hidden_act": "relu"}')
    assert names_of(made) != before != names_of(config(model=str(model)))


def test_a_tokenizer_that_the_model_reads_counts(tmp_path: Path) -> None:
    """DeepSeek-V4.1 looks up engrams by what its tokens mean."""
    model, tokens = write(tmp_path / "model"), write(tmp_path / "tokens", {"tokenizer.json": b"{}"})
    made = config(model=str(model), tokenizer=str(tokens))
    before = names_of(made)
    made.model_config.hf_text_config.engram_layer_ids = [1]
    found = names_of(made)
    (tokens / "tokenizer.json").write_bytes(b"[]")
    assert len({before, found, names_of(made)}) == 3


def test_the_commit_of_a_configuration_counts_that_lies_apart_from_the_weights(
    tmp_path: Path,
) -> None:
    """Into ``download_dir`` weights alone are fetched, and not how images are prepared."""
    hub(tmp_path)
    made = config(revision=COMMIT, download_dir=str(tmp_path))
    before = names_of(made)
    made.model_config.hf_config._commit_hash = "f" * 40
    assert names_of(made) != before


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
    monkeypatch.setattr(weights, "NAME_WAIT_S", 0.01)
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
