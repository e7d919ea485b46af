"""vLLM's schedulers with kvass and vLLM's own offloading in a ``MultiConnector``: the first one
that has tokens of a prompt loads them, both store, and a reset reaches both."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.vllm.fake_client import FakeClient
from tests.support.vllm.scheduler import (
    FIXED,
    SchedulerHarness,
    make_multi_configs,
    tiny_model,
)

PROMPT = range(4, 104)
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 64 << 20},
}


class Beside(SchedulerHarness):
    """Both connectors, in one order or the other. The copies of both succeed."""

    def __init__(self, client: FakeClient, *, kvass_first: bool) -> None:
        config, caches = make_multi_configs(FIXED)
        children = config.kv_transfer_config.kv_connector_extra_config["connectors"]
        children.insert(1 if kvass_first else 0, OFFLOADING)
        super().__init__(client, configs=(config, caches))
        self.client, self.stores = client, 0

    def report_of(self, metadata: Any) -> Any:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
            OffloadingWorkerMetadata,
        )

        if not hasattr(metadata, "store_jobs"):
            return None
        self.stores += len(metadata.store_jobs)
        jobs = [*metadata.store_jobs, *metadata.load_jobs]
        return OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(jobs, 1))

    def loaded(self, name: str) -> list[str]:
        """Who loads for a new request of ``PROMPT``, which runs to its end."""
        found: list[str] = []
        self.add(name, PROMPT, max_tokens=1)
        for _ in range(20):
            if not self.scheduler.has_requests():
                return found
            output, work = self.schedule()
            (theirs,) = (one for one in output.kv_connector_metadata.metadata if one is not work)
            found += ["kvass"] * len(work.loads) + ["offloading"] * len(theirs.load_jobs)
            self.client.commit(store.reservation for store in work.stores)
            self.finish(
                output,
                reported=list(self.open_steps),
                received=[load.request for load in work.loads]
                + [job.req_id for job in theirs.load_jobs.values()],
            )
        raise AssertionError("still busy")


@pytest.mark.parametrize("kvass_first", [True, False])
def test_the_first_that_has_tokens_loads_them(kvass_first: bool) -> None:
    client = FakeClient()
    world = Beside(client, kvass_first=kvass_first)
    free = world.free_blocks
    assert world.loaded("writer") == []
    assert len(client.rows) == 3
    assert world.stores > 0, "both store"
    assert world.scheduler.reset_prefix_cache()
    assert world.loaded("again") == ["kvass" if kvass_first else "offloading"]
    seen = [(one.lookup_tokens, one.hit_tokens, one.why) for one in client.results]
    again = (96, 96, "") if kvass_first else (96, 0, "not_loaded")
    assert seen == [(96, 0, "absent"), again], "what another connector loads is no hit of kvass"
    assert world.scheduler.reset_prefix_cache()
    assert world.free_blocks == free, "nobody holds a block"


def test_after_a_restart_of_the_engine_kvass_has_what_offloading_lost() -> None:
    client = FakeClient()
    assert Beside(client, kvass_first=False).loaded("writer") == []
    world = Beside(client, kvass_first=False)
    assert world.loaded("again") == ["kvass"]
    assert world.scheduler.reset_prefix_cache()
    assert world.loaded("and again") == ["offloading"], "it stored what kvass loaded"


@pytest.mark.parametrize("kvass_first", [True, False])
def test_a_reset_of_the_connectors_reaches_both(kvass_first: bool) -> None:
    client = FakeClient()
    world = Beside(client, kvass_first=kvass_first)
    world.loaded("writer")
    assert world.scheduler.reset_prefix_cache(reset_connector=True)
    assert client.rows == set()
    assert world.loaded("again") == []


@pytest.mark.parametrize("size", [None, 1.0])
def test_an_offloading_size_replaces_the_connector_that_is_named(size: float | None) -> None:
    """docs/vllm.md says so."""
    from vllm.engine.arg_utils import EngineArgs

    named = make_multi_configs()[0].kv_transfer_config
    arguments = EngineArgs(
        model=str(tiny_model()),
        skip_tokenizer_init=True,
        kv_transfer_config=named,
        kv_offloading_size=size,
    )
    found = arguments.create_engine_config().kv_transfer_config.kv_connector
    assert found == ("MultiConnector" if size is None else "OffloadingConnector")
