"""What kvass does for a request, as spans in the engine's OpenTelemetry traces.

Laws of this file:

- Without ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` in the environment nothing is imported or done. An
  engine that traces has set it, and the tracer provider; vLLM does so with
  ``--otlp-traces-endpoint``.
- A span is made when its work is over. Nothing waits for it.
"""

from __future__ import annotations

import os
import random
import re
import time
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from kvass.engine.boundary import log
from kvass.engine.step_work import Load, Store

if TYPE_CHECKING:
    from kvass.engine.protocols import Request
    from kvass.transfer.base import Done

ENDPOINT: Final = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
REQUEST: Final = "gen_ai.request.id"
"""As vLLM names it in its own spans."""
INTERNAL: Final = re.compile(r"(?:\d+_)?(.+)-[0-9a-f]{8}")
"""What vLLM makes of a request's id: a number for each of several answers, and random digits. Its
own spans have the id without."""


def begin() -> Tracing | None:
    """None: this engine does not trace."""
    if not os.environ.get(ENDPOINT):
        return None
    try:
        return Tracing()
    except ImportError as error:
        log.warning("kvass makes no spans: %s: pip install 'kvass[otel]'", error)
        return None


class Ids:
    """Ids of spans and traces. The SDK takes them from Python's ``random``, which vLLM seeds with
    the same number in every rank of every engine: they would repeat within a trace."""

    _random = random.SystemRandom()

    def generate_span_id(self) -> int:
        return self._random.randrange(1, 1 << 64)

    def generate_trace_id(self) -> int:
        return self._random.randrange(1, 1 << 128)

    def is_trace_id_random(self) -> bool:
        return True


class Tracing:
    """The spans of one half of the connector. Raises ``ImportError`` without OpenTelemetry. Spans
    of lookups are for one thread, those of copies for any."""

    def __init__(self) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._parent = TraceContextTextMapPropagator()
        self._asked: dict[str, int] = {}
        self._promoting: dict[str, int] = {}
        """Since when, in ns since the epoch, by request."""

    @cached_property
    def _tracer(self) -> Any:
        """With the first span: by then the engine has set the provider."""
        tracer = self._trace.get_tracer("kvass")
        if type(getattr(tracer, "id_generator", None)).__name__ == "RandomIdGenerator":
            vars(tracer)["id_generator"] = Ids()
        return tracer

    def asked(self, request: str) -> None:
        """A lookup is asked for, maybe again."""
        self._asked.setdefault(request, time.time_ns())

    def promoting(self, request: str) -> None:
        """Its lookup waits for tiers."""
        self._promoting.setdefault(request, time.time_ns())

    def answered(self, request: Request, tokens: int, hit: int) -> None:
        """The lookup of ``request`` is over."""
        now, promoting = time.time_ns(), self._promoting.pop(request.name, 0)
        began = self._asked.pop(request.name, now)
        figures = {"kvass.lookup_tokens": tokens, "kvass.hit_tokens": hit}
        lookup = self._span("kvass.lookup", request.name, request.trace, began, now, figures)
        if promoting:
            parent = self._trace.set_span_in_context(lookup)
            self._span("kvass.promote", request.name, parent, promoting, now, {})

    def forget(self, request: str) -> None:
        """The request ended."""
        self._asked.pop(request, None)
        self._promoting.pop(request, None)

    def copied(self, copy: Load | Store, done: Done) -> None:
        """A copy ended just now."""
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
        """``parent``: a context, or a header ``traceparent``, which may be empty."""
        if isinstance(parent, str):
            parent = self._parent.extract({"traceparent": parent})
        if internal := INTERNAL.fullmatch(request):
            request = internal[1]
        span = self._tracer.start_span(
            name, context=parent, start_time=began, attributes={REQUEST: request, **figures}
        )
        if not ok:
            span.set_status(self._trace.StatusCode.ERROR)
        span.end(end_time=ended)
        return span
