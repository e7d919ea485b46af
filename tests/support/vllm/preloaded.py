"""What forks for vLLM have imported. Nothing of kvass, which notes when its process started:
weights must be older than that."""

from __future__ import annotations

from importlib import import_module
from typing import Any

for module in (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "compressed_tensors",
):
    import_module(module)

# vLLM looks at a model's class in a process that imports vLLM for it, 8 s of a core, unless an
# earlier one left what it saw in the home folder. The fork will import that class anyway.
registry: Any = import_module("vllm.model_executor.models.registry")
registry._run_in_subprocess = lambda look: look()
