"""vLLM's messages between the two sides of the connector. vLLM's transport pickles them."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvass.connectors.vllm.adapt import KVConnectorMetadata, KVConnectorWorkerMetadata
from kvass.engine.step_work import StepWork


@dataclass
class StepMetadata(StepWork, KVConnectorMetadata):
    """Scheduler to workers: one step's loads and stores."""


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """Workers to scheduler: ``steps[s]`` ranks have settled every store of step ``s``."""

    steps: dict[int, int] = field(default_factory=dict)

    def aggregate(self, other: StepReport) -> StepReport:
        """Both reports in one."""
        steps = dict(self.steps)
        for step, ranks in other.steps.items():
            steps[step] = steps.get(step, 0) + ranks
        return StepReport(steps)
