"""What travels between the two sides of the connector, in vLLM's own messages.

Law of this file: plain values that pickle by themselves (vLLM's transport pickles them); no engine
object, no block hash. Block ids and slots are tuples per layer group.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvass.connectors.vllm.adapt import KVConnectorMetadata, KVConnectorWorkerMetadata
from kvass.layout.spans import Blocks
from kvass.types import Slots


@dataclass(frozen=True)
class Load:
    """Rows to copy into the blocks of one waiting request.

    ``skip[g]`` leading blocks of group ``g``'s first row are the engine's own, or of no use to it.
    ``lease`` 0: there is nothing to read any more, and the load must be reported as failed.
    ``given_s``: only a rank registered since then may copy.
    """

    request: str
    boot: bytes = b""
    lease: int = 0
    given_s: float = 0.0
    deadline_s: float = 0.0
    slots: tuple[Slots, ...] = ()
    blocks: Blocks = ()
    skip: tuple[int, ...] = ()


@dataclass(frozen=True)
class Store:
    """Blocks to copy into granted rows, after the forward pass of ``step``.

    ``computed`` is the ``StepWork.number`` of the step that computed them: an earlier one if the
    grant came late. ``slots[g]`` and ``blocks[g]`` are empty for a group of which nothing was
    granted.
    """

    step: int
    boot: bytes
    reservation: int
    given_s: float
    deadline_s: float
    slots: tuple[Slots, ...]
    blocks: Blocks
    computed: int = 0


@dataclass
class StepWork(KVConnectorMetadata):
    """Scheduler to workers: one step's loads and stores.

    ``step`` > 0 says that blocks are held until every rank has reported this number. ``number``
    counts all steps. Without ``computes`` the step has no forward pass.
    """

    step: int = 0
    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    number: int = 0
    computes: bool = True


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
