"""What each step of an engine did, seen from outside of its connector, whichever it is.

Only the hooks that every connector has are watched, on the engine's own objects.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tests.support.vllm.process import SeenStep


class StepLog:
    """The steps of ``scheduler`` from here on."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler, self._steps = scheduler, list[SeenStep]()
        self._pool = scheduler.kv_cache_manager.block_pool
        self._watch(scheduler, "schedule", self._began, self._planned)
        self._watch(scheduler, "update_from_output", None, self._ended)
        if (connector := scheduler.connector) is not None:
            self._watch(connector, "get_num_new_matched_tokens", None, self._asked)
            self._watch(connector, "update_state_after_alloc", None, self._allocated)

    def take(self) -> list[SeenStep]:
        """The steps since the last call."""
        steps, self._steps = self._steps, []
        return steps

    def _watch(
        self,
        owner: Any,
        name: str,
        before: Callable[[], None] | None,
        after: Callable[..., None],
    ) -> None:
        hook = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before()
            result = hook(*args, **kwargs)
            after(result, *args)
            return result

        setattr(owner, name, watched)

    def _began(self) -> None:
        step = SeenStep(began_s=time.monotonic(), free_blocks=self._pool.get_num_free_blocks())
        self._steps.append(step)

    def _planned(self, output: Any, *_: object) -> None:
        self._steps[-1].computed = dict(output.num_scheduled_tokens)

    def _asked(self, answer: tuple[int | None, bool], request: Any, *_: object) -> None:
        self._steps[-1].asked[request.request_id] = answer[0]

    def _allocated(self, _: None, request: Any, blocks: object, tokens: int, *__: object) -> None:
        if tokens:
            self._steps[-1].loads[request.request_id] = tokens

    def _ended(self, _: object, planned: Any, output: Any, *__: object) -> None:
        step = self._steps[-1]
        step.took_s = time.monotonic() - step.began_s
        if (report := output.kv_connector_output) is not None:
            step.loaded = sorted(report.finished_recving or ())
        live = self._scheduler.requests
        step.ended = [name for name in step.computed if name not in live]
