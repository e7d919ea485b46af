"""The plug-in with which vLLM knows ``KvassConnector`` by its name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector import factory
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvass.connectors import vllm as package
from kvass.connectors.vllm.plugin import register

IMPORTS = "import sys; before = set(sys.modules); import kvass.connectors.vllm.plugin; "
NEITHER = "assert not {'torch', 'vllm', 'numpy'} & set(sys.modules) - before"


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process in which vLLM knows no connector."""
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    package._connector.cache_clear()
    yield
    package._connector.cache_clear()


def test_vllm_finds_it_and_it_imports_nothing_before_it_is_called() -> None:
    (entry,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "kvass"]
    assert entry.load() is register
    subprocess.run([sys.executable, "-c", IMPORTS + NEITHER], check=True)


@pytest.mark.usefixtures("unknown")
def test_the_name_is_known_however_often_it_is_told() -> None:
    register()
    register()
    found = KVConnectorFactory.get_connector_class_by_name("KvassConnector")
    assert found is package.KvassConnector


@pytest.mark.usefixtures("unknown")
def test_who_loads_the_class_by_its_module_makes_the_name_known() -> None:
    loaded = package.KvassConnector
    assert KVConnectorFactory.get_connector_class_by_name("KvassConnector") is loaded


@pytest.mark.parametrize("gone", ["the class", "the function", "its parameters"])
def test_in_a_vllm_that_it_does_not_know_it_raises_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gone: str
) -> None:
    def other(cls: Any, name: str) -> None: ...

    if gone == "the class":
        monkeypatch.delattr(factory, "KVConnectorFactory")
    elif gone == "the function":
        monkeypatch.delattr(KVConnectorFactory, "register_connector")
    else:
        monkeypatch.setattr(KVConnectorFactory, "register_connector", classmethod(other))
    register()
    (line,) = [r.getMessage() for r in caplog.records]
    assert "cannot be told the name" in line
