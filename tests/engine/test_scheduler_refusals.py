"""Which engines vLLM refuses because they have a connector: each place in its sources is decided.

With ``KVASS`` such an engine is made without the connector (``connectors/vllm/opt_in.py``).
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import vllm

NAMES = frozenset(
    (
        *("kv_transfer_config", "kv_connector", "kv_connector_metadata", "connector_cls"),
        *("connector", "has_kv_transfer_group", "is_kv_transfer_instance", "KVConnectorFactory"),
    )
)
"""An expression with one of these names depends on whether there is a connector, or on which."""
SOURCES = ("kv_transfer_config", "kv_connector", "kv_transfer_group", "KVConnector")
"""A file without one of these texts has other things that are called connectors."""
OTHERS = (
    "benchmarks/",
    "distributed/ec_transfer/",
    "distributed/kv_transfer/kv_connector/v1/",
    "v1/hisparse/",
    "v1/kv_offload/",
    "v1/simple_kv_offload/",
)
"""Folders of other connectors."""

TABLE = """\
made without: vLLM cannot make the configuration, so opt_in makes it again without the connector
    config/vllm.py validate_mamba_cached_kernel: --use-replayssm is incompatible
    config/vllm.py __post_init__: --enable-return-routed-experts is incompatible with KV connectors
    config/vllm.py _verify_kv_transfer_compat: does not support sleep mode
    config/vllm.py _verify_kv_transfer_compat: PYTORCH_CUDA_ALLOC_CONF=expandable_segments
known: it comes later, so opt_in._refused_later knows it
    v1/core/sched/scheduler.py __init__: not self.is_encoder_decoder
    v1/core/kv_cache_utils.py resolve_kv_cache_block_sizes: with a single KV cache group
    v1/core/kv_cache_utils.py resolve_kv_cache_block_sizes: be divisible by prefix_match_unit
    models/deepseek_v41/nvidia/model.py __init__: DeepSeek-V4.1 PCP currently requires
    models/step5/nvidia/model.py _verify_step5_dsa_kv_transfer_compatibility: Step5 DSA
not ours: it depends on the name of another connector, or is so with vLLM's own prefix cache, too
    config/kv_transfer.py hisparse_host_pool_gib: HiSparseConnector
    config/vllm.py _verify_aux_output_compatibility: PD auxiliary output is not supported
    config/vllm.py __post_init__: must be 1 or equal to the NIXL transfer parallel size
    config/vllm.py __post_init__: PD with decode_context_parallel_size > 1
    config/vllm.py validate_block_size: cp_kv_cache_interleave_size
    v1/core/kv_cache_utils.py resolve_kv_cache_block_sizes: align with each spec's
    v1/engine/core.py _initialize_kv_caches: SimpleCPUOffloadConnector
cannot happen: there is a connector with a role and a known name, which has what is asked for
    config/kv_transfer.py __post_init__: specify kv_role when kv_connector is set
    distributed/kv_transfer/kv_connector/factory.py create_connector: kv_transfer_config must be
    distributed/kv_transfer/kv_connector/factory.py create_connector: does not support HMA
    distributed/kv_transfer/kv_connector/factory.py get_connector_class: raise
    distributed/kv_transfer/kv_transfer_state.py _sync_engine_id_across_tp: assert
    entrypoints/llm.py __init__: Invalid 'kv_transfer_config' provided
    v1/core/sched/scheduler.py _connector_finished: len(self.kv_cache_config.kv_cache_groups) == 1
    v1/core/sched/scheduler.py reset_connector_cache: self.connector_prefix_cache_stats is not None
    v1/core/sched/scheduler.py _drain_deferred_loads: self.connector is not None
    v1/core/sched/scheduler.py _load_restores_replay_window: self.connector is not None
    v1/core/sched/scheduler.py _update_waiting_for_remote_kv: self.connector is not None
    v1/worker/gpu/kv_connector.py pre_forward: kv_connector_metadata is not None
    v1/worker/gpu_model_runner.py execute_model: kv_connector_metadata is not None
    v1/worker/kv_connector_model_runner_mixin.py _get_kv_connector_output: assert
"""
"""What becomes of it, and below that, indented, the file and function with a part of the text."""


def overlays() -> Iterator[Path]:
    """The packages of other versions, where the tests have them."""
    for folder in Path(os.environ.get("VLLM_OVERLAYS", "/nowhere")).glob("*/vllm/__init__.py"):
        yield folder.parent


PACKAGES = {Path(vllm.__file__).parent, *overlays()}


@pytest.mark.parametrize("package", sorted(PACKAGES), ids=lambda path: path.parent.name)
def test_each_place_is_decided(package: Path) -> None:
    """If this fails: read what vLLM refuses there. If it can refuse our connector, and not while it
    makes the configuration, name it in ``opt_in._refused_later``. Then add it to the table."""
    found = list(refusals(package))
    lines = [line.strip() for line in TABLE.splitlines() if line.startswith(" ")]
    decided = [line.split(": ", 1) for line in lines]
    assert [
        (where, text)
        for where, text in found
        if not any(where == name and part in text for name, part in decided)
    ] == []
    known = {where for where, _ in found}
    assert "v1/core/sched/scheduler.py __init__" in known
    assert "config/vllm.py validate_mamba_cached_kernel" in known


def test_what_it_sees(tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text(
        "class Config:\n"
        "    def guard(self):\n"
        "        if self.kv_transfer_config is None:\n"
        "            return\n"
        "        for one in self.all:\n"
        "            raise ValueError('after a return')\n"
        "    def kept(self):\n"
        "        has = self.kv_transfer_config is not None\n"
        "        raise_it(has)\n"
        "        if self.other and has:\n"
        "            raise ValueError('a variable')\n"
        "        raise ValueError('nothing to do with it')\n"
        "    def asserted(self):\n"
        "        with self.lock:\n"
        "            assert not (self.new and self.kv_transfer_config)\n"
        "        assert self.new\n"
    )
    assert list(refusals(tmp_path)) == [
        ("new.py guard", "raise ValueError('after a return')"),
        ("new.py kept", "raise ValueError('a variable')"),
        ("new.py asserted", "assert not (self.new and self.kv_transfer_config)"),
    ]


def refusals(package: Path) -> Iterator[tuple[str, str]]:
    """Each ``raise`` and ``assert`` of vLLM in the folder ``package`` that depends on a connector:
    its file and function, and its text."""
    for file in sorted(package.rglob("*.py")):
        name = str(file.relative_to(package))
        source = "" if name.startswith(OTHERS) else file.read_text()
        if not any(text in source for text in SOURCES):
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for text in Function().refusals(node.body, False):
                    yield f"{name} {node.name}", text


class Function:
    """One function of vLLM."""

    def __init__(self) -> None:
        self._names = set(NAMES)
        """And its variables that were set from an expression with one of these."""

    def refusals(self, body: Sequence[ast.stmt], guarded: bool) -> Iterator[str]:
        """The texts of what ``body`` raises. ``guarded``: it runs because of a connector, or
        because there is none."""
        for one in body:
            if isinstance(one, ast.Assign) and self._asks(one.value):
                self._names |= {name.id for name in one.targets if isinstance(name, ast.Name)}
            raises = isinstance(one, ast.Raise) and guarded
            if raises or (isinstance(one, ast.Assert) and (guarded or self._asks(one.test))):
                yield ast.unparse(one)
            asks = isinstance(one, ast.If | ast.While) and self._asks(one.test)
            for inner in _bodies(one):
                yield from self.refusals(inner, guarded or asks)
            if asks and isinstance(one, ast.If) and isinstance(one.body[-1], ast.Return):
                guarded = True  # what follows runs because of the same

    def _asks(self, expression: ast.expr) -> bool:
        return any(
            getattr(node, "id", getattr(node, "attr", None)) in self._names
            for node in ast.walk(expression)
        )


def _bodies(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The statements inside a statement; none of a function, which is looked at by itself."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    for name in ("body", "orelse", "finalbody"):
        yield getattr(statement, name, [])
    for handler in getattr(statement, "handlers", []):
        yield handler.body
