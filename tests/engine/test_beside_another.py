"""A vLLM server in which kvass is one of two connectors. vLLM's log in the API server sums up what
each of them counted, and finds its class by name."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from examples.serving import ask, servers
from examples.tiny import some_prompt, transfer_config, whole_blocks
from kvass.testing.daemon import running_daemon

FILES = "ExampleConnector"
"""vLLM's own, which keeps KV in files."""


@pytest.mark.engine
def test_a_server_counts_the_hits_of_one_of_its_connectors(tmp_path: Path) -> None:
    """Without kvass's plug-in, which ``VLLM_PLUGINS`` leaves out."""
    files = {"shared_storage_path": str(tmp_path / "files")}
    other = {"kv_connector": FILES, "kv_role": "kv_both", "kv_connector_extra_config": files}
    prompt = some_prompt(1000, seed=40)
    with running_daemon(tmp_path, l1_size="64MiB", lookup_budget_ms=10_000) as daemon:
        kvass = {
            **transfer_config(daemon.socket),
            "kv_connector_module_path": "kvass.connectors.vllm",
        }
        both = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [kvass, other]},
        }
        flags = {"no_enable_prefix_caching": True}  # so that each hit is one of kvass
        environment = {"VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "INFO"}
        with servers(tmp_path, daemon, [both], flags, **environment) as (url,):
            first, *again = [ask(url, prompt) for _ in range(3)]
            counted = httpx.get(f"{url}/metrics", trust_env=False).text
    assert [reply.cached for reply in (first, *again)] == [0, *[whole_blocks(1000)] * 2]
    assert {tuple(reply.tokens) for reply in again} == {tuple(first.tokens)}
    assert list((tmp_path / "files").iterdir()), "the other connector stored, too"
    lookups = [line for line in counted.splitlines() if line.startswith("vllm:kvass_lookups_total")]
    assert [float(line.split()[-1]) for line in lookups] == [3.0]
