"""Events as lines of text, for logs, traces and replays.

A line is JSON: ``[time, the event's name, its fields]``, with bytes in base64. ``parse`` is the
inverse of ``line``, unless the line was cut.
"""

from __future__ import annotations

import json
from typing import Any, Final, get_args

import msgspec
import numpy as np

from kvass.core.effects import ENDS, Event, Received
from kvass.messages import FindSegments, IndexChunks

MAX_CHARS: Final = 8 << 20
"""The length at which a line of a log is cut. The line of the largest frame is shorter."""

_KINDS: Final[dict[str, type[Event]]] = {
    kind.__name__: kind for kind in (*get_args(Event), *ENDS.values())
}


def line(now: float, event: Event, max_chars: int | None = MAX_CHARS) -> str:
    """The line of an event. It is cut at ``max_chars`` characters, with a remark.

    A line with a limit is for a log, so zeros replace the tokens of prompts.
    """
    if max_chars is not None and isinstance(event, Received):
        message = event.message
        if isinstance(message, IndexChunks | FindSegments):
            hidden = msgspec.structs.replace(message, tokens=bytes(len(message.tokens)))
            event = msgspec.structs.replace(event, message=hidden)
    plain = msgspec.to_builtins(event, enc_hook=_plain)
    text = json.dumps([now, type(event).__name__, plain])
    if max_chars is None or len(text) <= max_chars:
        return text
    return f"{text[:max_chars]} (cut: {len(text)} characters)"


def parse(text: str) -> tuple[float, Event]:
    """The time and the event of a line.

    Raises:
        ValueError: the line was cut.
    """
    now, kind, fields = json.loads(text)
    event: Event = msgspec.convert(fields, _KINDS[kind], dec_hook=_array)
    return now, event


def _plain(value: Any) -> Any:
    assert isinstance(value, np.ndarray), value
    return value.tolist()


def _array(kind: Any, value: Any) -> Any:
    return np.array(value, np.bool_)
