"""A pytest plugin for vLLM's own tests: each scheduler of a test has a ``MultiConnector`` of the
test's connector and kvass.

Law of this file: a test sees its own connector, and the scheduler sees the ``MultiConnector``. So a
test may look into its connector, and what it asserts of the scheduler holds beside kvass, or not.

The plugin is loaded by its file's name into a run of vLLM's tests, whose package is called
``tests``, too: it imports nothing of ours but kvass. Without ``BESIDE`` it changes nothing.
kvass is real: a daemon, the connector's scheduler side, and a worker side that copies pages. The
worker ends all copies of a step before the scheduler hears of the step. Each scheduler has rows of
its own, because vLLM alone has no hits of an earlier test either.

It writes what became of each test to ``BESIDE_REPORT``, a file of JSON.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import json
import os
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

TESTS = os.path.join(os.getcwd(), "tests") + os.sep
"""vLLM's tests, from whose parent folder pytest is run."""
BESIDE = os.environ.get("BESIDE", "")
"""``last`` or ``first``: where kvass stands in the ``MultiConnector``."""
PATIENCE_S = 10.0

_names = itertools.count()


def asked_by_a_test() -> bool:
    """Whether the caller's caller is code of a test."""
    return sys._getframe(2).f_code.co_filename.startswith(TESTS)


class Beside:
    """What one scheduler has: the test's connector, the ``MultiConnector``, kvass's two sides."""

    def __init__(self, own: Any, scheduler: Any, run: Run) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole, supports_hma
        from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as multi

        self.own, self.run = own, run
        self.at = 1 if BESIDE == "last" else 0
        config = kvass_config(scheduler.vllm_config, run.socket)
        caches = with_memory(scheduler.kv_cache_config)
        self.multi: Any = multi.MultiConnector(config, KVConnectorRole.SCHEDULER, caches)
        (self.kvass,) = self.multi._connectors
        self.multi._connectors.insert(1 - self.at, own)
        configs = self.multi._ktc_kv_transfer_config
        configs.insert(1 - self.at, scheduler.vllm_config.kv_transfer_config)
        self.multi._all_support_hma = supports_hma(own)
        self.outputs: dict[int, tuple[Any, Any]] = {}
        self.worker: Any = None
        run.count("made")
        if self.kvass._planner is None:
            run.count("off")
            return
        clients = [patient(self.kvass._planner.client)]
        worker = worker_side(config, caches)
        if worker._copier is None or worker._copier._client is None:
            worker.shutdown()
            run.count("off")
        else:
            self.worker = worker
            clients.append(worker._copier._client)
        wait_until(lambda: all(one.connection is not None for one in clients), "the connections")
        lookups = self.kvass.get_num_new_matched_tokens

        @functools.wraps(lookups)
        def counted(*args: Any) -> Any:
            run.count("lookups")
            return lookups(*args)

        self.kvass.get_num_new_matched_tokens = counted

    def replace(self, own: Any) -> None:
        """Put a mock of the test where its connector was."""
        from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma

        self.own = self.multi._connectors[1 - self.at] = own
        self.multi._all_support_hma = supports_hma(own)

    def seen(self, output: Any) -> None:
        """Put the metadata of the test's connector where that of the ``MultiConnector`` was."""
        whole = output.kv_connector_metadata
        if hasattr(whole, "metadata"):
            self.outputs[id(output)] = output, whole.metadata[self.at]
            output.kv_connector_metadata = whole.metadata[1 - self.at]

    def answered(self, scheduler_output: Any, answer: Any) -> Any:
        """The workers' ``answer`` to a step, with that of kvass's worker."""
        from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as multi
        from vllm.v1.outputs import KVConnectorOutput

        _, work = self.outputs.pop(id(scheduler_output), (None, None))
        report, ended, failed = self._copy(work)
        theirs = answer.kv_connector_output
        if theirs is None and report is None and not ended:
            return answer
        theirs = theirs or KVConnectorOutput()
        reports = [theirs.kv_connector_worker_meta]
        reports.insert(self.at, report)
        changes: dict[str, Any] = {}
        if any(one is not None for one in reports):
            changes["kv_connector_worker_meta"] = multi.MultiKVConnectorWorkerMetadata(
                metadata=tuple(reports)
            )
        if ended:
            changes["finished_recving"] = {*(theirs.finished_recving or ()), *ended}
            changes["failed_recving"] = {*(theirs.failed_recving or ()), *failed}
        answer = copy.copy(answer)
        answer.kv_connector_output = dataclasses.replace(theirs, **changes)
        return answer

    def _copy(self, work: Any) -> tuple[Any, set[str], set[str]]:
        """Run a step of kvass's worker until its copies have ended."""
        report: Any = None
        ended, failed = set[str](), set[str]()
        worker = self.worker
        if work is None or worker is None:
            return report, ended, failed
        worker.handle_preemptions(work)
        worker.bind_connector_metadata(work)
        worker.wait_for_save()
        loads = {load.request for load in work.loads}
        self.run.count("stores", len(work.stores))
        self.run.count("loads", len(loads))

        def settled() -> bool:
            nonlocal report
            results = worker.get_transfer_results(set())
            ended.update(results.finished_recving)
            failed.update(results.failed_recving)
            if (more := worker.build_connector_worker_meta()) is not None:
                report = more if report is None else report.aggregate(more)
            stored = not work.stores or (report is not None and work.step in report.steps)
            return stored and loads <= ended

        wait_until(settled, "the copies of a step")
        worker.clear_connector_metadata()
        return report, ended - failed, failed

    def close(self) -> None:
        """End both sides of kvass."""
        self.kvass.shutdown()
        if self.worker is not None:
            self.worker.shutdown()


def patient(client: Any) -> Any:
    """``client``, which waits for each answer: a busy machine makes no difference."""
    client._reserve_wait_s = client.step.wait_s = client.step.left_s = PATIENCE_S
    begin = client.begin_reserve
    client.begin_reserve = lambda items, width, wait=True: begin(items, width)
    return client


def kvass_config(vllm_config: Any, socket: str) -> Any:
    """``vllm_config`` with a ``MultiConnector`` of kvass alone."""
    from vllm.config import KVTransferConfig

    theirs = vllm_config.kv_transfer_config
    kvass = {
        "kv_connector": "KvassConnector",
        "kv_connector_module_path": "kvass.connectors.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "kvass.socket": socket,
            "kvass.tag": f"{os.getpid()}.{next(_names)}",
            "kvass.model_id": "none",
            "kvass.fixed_weights": True,
        },
    }
    changed = copy.copy(vllm_config)
    changed.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [kvass]},
        **({"engine_id": theirs.engine_id} if theirs is not None else {}),
    )
    return changed


def with_memory(caches: Any) -> Any:
    """``caches`` with a tensor for each layer, where a test of schedulers has none."""
    from vllm.v1.kv_cache_interface import KVCacheTensor

    if caches.kv_cache_tensors:
        return caches
    changed = copy.copy(caches)
    changed.kv_cache_tensors = [
        KVCacheTensor(
            size=caches.num_blocks * page, layers=[name], layer_stride=0, block_stride=page
        )
        for group in caches.kv_cache_groups
        for page in [group.kv_cache_spec.page_size_bytes]
        for name in group.layer_names
    ]
    return changed


def worker_side(config: Any, caches: Any) -> Any:
    """kvass's worker side, with memory of its own."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    ((kind, own),) = MultiConnector._get_connector_classes_and_configs(config)
    worker: Any = kind(own, KVConnectorRole.WORKER, caches)
    memory = {}
    for tensor in caches.kv_cache_tensors:
        pages = torch.zeros(tensor.size, dtype=torch.uint8)
        for number, name in enumerate(tensor.layers):
            memory[name] = pages[number * tensor.layer_stride :]
    worker.register_kv_caches(memory)
    return worker


def wait_until(condition: Any, what: str) -> None:
    """Wait for ``condition``."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"kvass beside vLLM's tests: in vain: {what}")
        time.sleep(0.002)


class Run:
    """One run of pytest: what became of each test, and what kvass did in it."""

    def __init__(self) -> None:
        self.socket = ""
        self.outcomes: dict[str, str] = {}
        self.did: dict[str, Counter[str]] = {}
        self._now = ""
        self._open: list[Beside] = []
        self._ends = ExitStack()

    def count(self, what: str, number: int = 1) -> None:
        """Count what kvass does in the test that runs."""
        self.did.setdefault(self._now, Counter())[what] += number

    def beside(self, scheduler: Any, own: Any) -> Beside:
        """kvass beside the connector ``own`` of a scheduler."""
        made = Beside(own, scheduler, self)
        self._open.append(made)
        return made

    def start(self) -> None:
        """Start the daemon, and put kvass beside the connector of each scheduler."""
        from vllm.v1.core.sched.scheduler import Scheduler

        from kvass.testing.daemon import running_daemon

        folder = Path(self._ends.enter_context(tempfile.TemporaryDirectory(prefix="kvass")))
        daemon = running_daemon(folder, l1_size="256MiB", lookup_budget_ms=10_000)
        self.socket = self._ends.enter_context(daemon).socket
        schedule, update = Scheduler.schedule, Scheduler.update_from_output

        def scheduled(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            output = schedule(scheduler, *args, **kwargs)
            if asked_by_a_test() and (beside := scheduler.__dict__.get("kvass_beside")):
                beside.seen(output)
            return output

        def updated(scheduler: Any, output: Any, answer: Any, *args: Any, **kwargs: Any) -> Any:
            if asked_by_a_test() and (beside := scheduler.__dict__.get("kvass_beside")):
                answer = beside.answered(output, answer)
            return update(scheduler, output, answer, *args, **kwargs)

        for name, value in (
            ("schedule", scheduled),
            ("update_from_output", updated),
            ("connector", connector_property(self)),
        ):
            patch = mock.patch.object(Scheduler, name, value, create=name == "connector")
            self._ends.enter_context(patch)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._now = item.nodeid
        try:
            return (yield)
        finally:
            while self._open:
                self._open.pop().close()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            before = self.outcomes.get(report.nodeid)
            self.outcomes[report.nodeid] = "failed" if before == "failed" else report.outcome

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self.outcomes[report.nodeid] = f"not collected: {report.outcome}"

    def pytest_unconfigure(self) -> None:
        self._ends.close()
        if where := os.environ.get("BESIDE_REPORT"):
            found = {"outcomes": self.outcomes, "kvass": self.did}
            Path(where).write_text(json.dumps(found, indent=1, sort_keys=True))


def connector_property(run: Run) -> property:
    """The attribute ``connector`` of a scheduler: the test's own for a test, else all."""

    def get(scheduler: Any) -> Any:
        beside = scheduler.__dict__.get("kvass_beside")
        if beside is None:
            return None
        return beside.own if asked_by_a_test() else beside.multi

    def set_to(scheduler: Any, own: Any) -> None:
        beside = scheduler.__dict__.get("kvass_beside")
        if beside is not None and own is not None:
            beside.replace(own)
        else:
            scheduler.__dict__["kvass_beside"] = own and run.beside(scheduler, own)

    return property(get, set_to)


def pytest_configure(config: pytest.Config) -> None:
    run = Run()
    config.pluginmanager.register(run, "kvass beside")
    if BESIDE:
        run.start()
