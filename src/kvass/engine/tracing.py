"""OpenTelemetry spans of lookups, promotions and copies, as part of the engine's traces.

Laws of this file:

- Without ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` in the environment, nothing is imported or done. An
  engine that traces sets this variable and the tracer provider. vLLM does so with
  ``--otlp-traces-endpoint``.
- A span is made after its work has ended. Nothing waits for it.
"""

from __future__ import annotations

import os
import random
import time
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from kvass.client.explanation import users_id
from kvass.engine.boundary import log
from kvass.engine.observers import Observer
from kvass.engine.request_state import Answer, LoadState, RequestState
from kvass.engine.step_work import Load, Store
from kvass.types import short_name

if TYPE_CHECKING:
    from kvass.transfer.base import Done

ENDPOINT: Final = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
REQUEST: Final = "gen_ai.request.id"
"""The attribute with the request's id, as in vLLM's own spans."""
ENDED_BY: Final = "kvass.ended_by"
"""The attribute with the reason for which the match was not longer."""


def begin() -> Tracing | None:
    """The tracing of this process. None: the engine does not trace, or OpenTelemetry is missing."""
    if not os.environ.get(ENDPOINT):
        return None
    try:
        return Tracing()
    except ImportError as error:
        log.warning("kvass makes no spans: %s: pip install 'kvass[otel]'", error)
        return None


class Ids:
    """A generator of random ids for spans and traces. The SDK's own generator uses Python's
    ``random``. vLLM seeds that with the same number in every rank of every engine, so ids would
    repeat within a trace."""

    _random = random.SystemRandom()

    def generate_span_id(self) -> int:
        return self._random.randrange(1, 1 << 64)

    def generate_trace_id(self) -> int:
        return self._random.randrange(1, 1 << 128)

    def is_trace_id_random(self) -> bool:
        return True


class Tracing(Observer):
    """The maker of the spans of one process. Raises ``ImportError`` without OpenTelemetry. All
    methods but ``copied`` are called from one thread; ``copied`` from any."""

    def __init__(self) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._parent = TraceContextTextMapPropagator()
        self._lookup_began: dict[str, int] = {}
        self._promotion_began: dict[str, int] = {}
        """The beginning of each lookup and of each promotion, by request: ns since the epoch."""

    @cached_property
    def _tracer(self) -> Any:
        """The tracer. It is made with the first span, because by then the engine has set its
        provider."""
        tracer = self._trace.get_tracer("kvass")
        if type(getattr(tracer, "id_generator", None)).__name__ == "RandomIdGenerator":
            vars(tracer)["id_generator"] = Ids()
        return tracer

    def asked(self, state: RequestState) -> None:
        """A lookup begins, unless the engine repeats one that was answered."""
        if state.state is not LoadState.ANSWERED:
            self._lookup_began.setdefault(state.request.name, time.time_ns())

    def promoting(self, state: RequestState) -> None:
        """The lookup waits for tiers from now on."""
        self._promotion_began.setdefault(state.request.name, time.time_ns())

    def answered(self, state: RequestState, answer: Answer, first: bool) -> None:
        if not first:
            return
        request, now = state.request, time.time_ns()
        promoting = self._promotion_began.pop(request.name, 0)
        began = self._lookup_began.pop(request.name, now)
        figures: dict[str, Any] = {
            "kvass.lookup_tokens": answer.asked,
            "kvass.hit_tokens": answer.end - answer.local,
        }
        if answer.why:
            figures[ENDED_BY] = answer.why
        lookup = self._span("kvass.lookup", request.name, request.trace, began, now, figures)
        if promoting:
            parent = self._trace.set_span_in_context(lookup)
            self._span("kvass.promote", request.name, parent, promoting, now, {})

    def ended(self, state: RequestState) -> None:
        """Make no spans of what was not answered."""
        self._lookup_began.pop(state.request.name, None)
        self._promotion_began.pop(state.request.name, None)

    def copied(self, copy: Load | Store, done: Done) -> None:
        """``copy`` ended just now."""
        now = time.time_ns()
        began = now - int(done.seconds * 1e9)
        figures = {"kvass.bytes": done.job.bytes, "kvass.outcome": done.outcome}
        self._span(f"kvass.{copy.kind}", copy.request, copy.trace, began, now, figures, done.ok)

    def _span(
        self,
        name: str,
        request: str,
        parent: Any,
        began: int,
        ended: int,
        figures: dict[str, Any],
        ok: bool = True,
    ) -> Any:
        """A span that began and ended at these times (ns since the epoch). ``parent``: a context,
        or a ``traceparent`` header, which may be empty."""
        if isinstance(parent, str):
            parent = self._parent.extract({"traceparent": parent})
        request = users_id(short_name(request))  # as in vLLM's own spans
        span = self._tracer.start_span(
            name, context=parent, start_time=began, attributes={REQUEST: request, **figures}
        )
        if not ok:
            span.set_status(self._trace.StatusCode.ERROR)
        span.end(end_time=ended)
        return span
