"""Which files are old enough to be those that an engine loads: older than its making, not than its
process."""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vllm.plugins
from vllm.engine.arg_utils import EngineArgs

from kvass.connectors import vllm as package
from kvass.connectors.vllm import making
from kvass.engine import weights
from kvass.engine.identity import Indescribable
from kvass.engine.model_files import Hub
from tests.support.vllm.scheduler import (
    inert_reason,
    make_configs,
    multi_connector,
    read_setup,
    tiny_model,
)


def saved(folder: Path) -> Path:
    """A model that was saved just now, but at an earlier time of the file system's clock."""
    model = shutil.copytree(tiny_model(), folder / "model", copy_function=shutil.copyfile)
    newest_ns = max(one.stat().st_ctime_ns for one in [model, *model.iterdir()])
    while newest_ns > weights.now_ns():
        time.sleep(0.001)
    return Path(model)


def save_again(model: Path) -> None:
    """The same bytes, at another time."""
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes())


def arguments(model: Path, **fields: Any) -> Any:
    """vLLM's arguments of an engine with our connector."""
    transfer = make_configs()[0].kv_transfer_config
    given = {"model": str(model), "skip_tokenizer_init": True, "max_model_len": 1024}
    return EngineArgs(**(given | {"kv_transfer_config": transfer} | fields))


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that made no engine yet."""
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    monkeypatch.setattr(making, "_loaded", None)


def test_a_model_that_its_own_process_saved_is_served(tmp_path: Path) -> None:
    """And not if a file was replaced while the engine was made. Each engine has its own time."""
    _, caches = make_configs()
    one, other = saved(tmp_path / "one"), tmp_path / "other"
    configs = [arguments(one).create_engine_config()]
    assert read_setup(configs[0], caches)
    configs.append(arguments(saved(other)).create_engine_config())
    assert read_setup(configs[1], caches)
    save_again(one)
    assert "changed since this engine started" in inert_reason(configs[0], caches)
    assert read_setup(configs[1], caches)


@pytest.mark.usefixtures("first")
def test_for_the_first_engine_it_is_when_the_plugins_were_loaded(tmp_path: Path) -> None:
    """That is before vLLM reads the model's configuration."""
    _, caches = make_configs()
    model = saved(tmp_path)
    given = arguments(model)
    assert read_setup(given.create_engine_config(), caches)
    save_again(model)
    assert "changed since this engine started" in inert_reason(given.create_engine_config(), caches)
    assert read_setup(arguments(model).create_engine_config(), caches), "the second engine"


@pytest.mark.usefixtures("first")
def test_an_engine_whose_class_is_not_asked_for_has_the_time_of_the_plugins(tmp_path: Path) -> None:
    _, caches = make_configs()
    model = saved(tmp_path)
    given = arguments(model, disable_hybrid_kv_cache_manager=True)
    config = given.create_engine_config()
    assert making._noted(config.model_config) is None
    assert read_setup(config, caches)
    save_again(model)
    assert "changed since this engine started" in inert_reason(config, caches)


def test_other_files_that_an_engine_reads_are_older_than_its_making(tmp_path: Path) -> None:
    """A quantization file, and the note of the Hub's client about a revision."""
    _, caches = make_configs()
    model, file, repo = saved(tmp_path), tmp_path / "quantization", tmp_path / "models--some--one"
    commit = "0123456789" * 4
    (repo / "refs").mkdir(parents=True)
    (repo / "snapshots" / commit).mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    file.write_text("{}")
    config = arguments(model).create_engine_config()
    config.model_config.hf_overrides = {"quantization_config_file": str(file)}
    hub = Hub(str(tmp_path), making.since_ns(config))
    assert read_setup(config, caches)
    assert hub.folder("some/one", None, None).name == commit
    file.write_text("{}")
    (repo / "refs" / "main").write_text(commit)
    assert "quantization changed since this engine started" in inert_reason(config, caches)
    with pytest.raises(Indescribable, match="which commit of some/one was loaded is not known"):
        hub.folder("some/one", None, None)


@pytest.mark.parametrize("where", ["MultiConnector", "the module's path"])
def test_it_is_known_however_the_connector_is_configured(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without the plug-in, which ``VLLM_PLUGINS`` may leave out."""
    monkeypatch.setattr(making, "_loaded", None)
    transfer: dict[str, Any] = multi_connector({}, 0) if where == "MultiConnector" else {}
    transfer = make_configs(**transfer)[0].kv_transfer_config
    before_ns = weights.now_ns()
    config = arguments(saved(tmp_path), kv_transfer_config=transfer).create_engine_config()
    children = [config]
    if where == "MultiConnector":
        from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

        children = [one for _, one in MultiConnector._get_connector_classes_and_configs(config)]
    assert all(before_ns < making.since_ns(one) < time.time_ns() for one in children)


def by_a_worker() -> Any:
    """A configuration that another process has made; here vLLM asks for the class too late."""
    vllm.plugins.load_general_plugins()
    config, _ = make_configs(model=tiny_model())
    package.__getattr__("KvassConnector")
    return config


def by_a_copy() -> Any:
    """As a worker that is spawned gets it."""
    return copy.deepcopy(arguments(tiny_model()).create_engine_config())


@pytest.mark.usefixtures("first")
@pytest.mark.parametrize("made", [by_a_worker, by_a_copy])
def test_in_another_process_it_is_the_start_of_that(
    made: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = made()
    monkeypatch.setattr(making, "_loaded", making._loaded if made is by_a_worker else None)
    assert making.since_ns(config) == weights.started_ns()


def test_a_file_that_is_written_later_is_newer(tmp_path: Path) -> None:
    """The clock of a file system is behind, by up to 10 ms."""
    for number in range(100):
        now_ns = weights.now_ns()
        (tmp_path / str(number)).touch()
        assert (tmp_path / str(number)).stat().st_ctime_ns > now_ns
    time.sleep(0.02)
    assert (tmp_path / "99").stat().st_ctime_ns <= weights.now_ns()
