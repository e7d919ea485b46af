"""kvass beside vLLM's own offloading, in a ``MultiConnector``: the first connector that has tokens
loads them, and both store. vLLM's log in the API server sums up what each of them counted, and
finds its class by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from examples import serving
from examples.serving import ask, servers
from examples.tiny import some_prompt, transfer_config, whole_blocks
from kvass.testing.daemon import running_daemon
from tests.engine.conftest import Starter
from tests.support.vllm.http_server import forked
from tests.support.vllm.judge import check_same
from tests.support.vllm.process import EngineProcess, Prompt

OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": 64 << 20,
        "spec_name": "HostOffloadingSpec",
        "spec_module_path": "bench.peers.offloading_spec",
    },
}


def both(*connectors: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


@pytest.mark.slow
@pytest.mark.engine
def test_a_server_counts_what_each_of_its_connectors_does(tmp_path: Path) -> None:
    """Without kvass's plug-in, which ``VLLM_PLUGINS`` leaves out."""
    prompt = some_prompt(1000, seed=40)
    with running_daemon(tmp_path, l1_size="64MiB", lookup_budget_ms=10_000) as daemon:
        kvass = {
            **transfer_config(daemon.socket),
            "kv_connector_module_path": "kvass.connectors.vllm",
        }
        flags = {"no_enable_prefix_caching": True}  # so that each hit is one of kvass
        environment = {"VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "INFO"}
        with (
            mock.patch.object(serving, "_process", forked),
            servers(tmp_path, daemon, [both(kvass, OFFLOADING)], flags, **environment) as (url,),
        ):
            first, *again = [ask(url, prompt) for _ in range(3)]
            counted = httpx.get(f"{url}/metrics", trust_env=False).text
    assert [reply.cached for reply in (first, *again)] == [0, *[whole_blocks(1000)] * 2]
    assert {tuple(reply.tokens) for reply in again} == {tuple(first.tokens)}

    def figure(name: str) -> float:
        return sum(map(float, re.findall(rf"^vllm:{name}{{.*}} (.+)$", counted, re.M)))

    assert figure("kvass_lookups_total") == 3
    assert figure("kv_offload_store_bytes_total") > 0
    assert figure("kv_offload_load_bytes_total") == 0, "kvass is first, and has all"


@pytest.mark.engine
def test_each_of_two_connectors_serves_what_the_other_lacks(tmp_path: Path, start: Starter) -> None:
    """Hits are compared with those of vLLM's own cache."""
    old, new = (some_prompt(1000, seed) for seed in (41, 42))
    found = whole_blocks(1000)
    with running_daemon(tmp_path, l1_size="64MiB", lookup_budget_ms=10_000) as daemon:
        kvass = transfer_config(daemon.socket, fixed_weights=True)

        def started(name: str, *connectors: dict[str, Any]) -> EngineProcess:
            return start(name, socket=Path(daemon.socket), transfer=both(*connectors)).wait_ready()

        engine = started("kvass first", kvass, OFFLOADING)
        assert engine.store(Prompt(old, 8))[0].cached == 0
        right = engine.one(old)
        assert (right.local, right.external) == (found, 0)
        engine.kill()
        engine = started("offloading first", OFFLOADING, kvass)
        hit = engine.one(old)
        assert (hit.local, hit.external) == (0, found), "after a restart kvass alone has it"
        check_same(hit, right)
        engine.one(new)
        right = engine.one(new)
        daemon.stop()
    assert engine.reset()
    hit = engine.one(new)
    assert (hit.local, hit.external) == (0, found), "without a daemon offloading has it"
    check_same(hit, right)
    assert engine.reset(connector=True)
    assert engine.one(new).cached == 0
