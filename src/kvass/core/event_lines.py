"""Events as lines of text, and back: for logs, traces and replays.

A line is JSON: ``[time, the event's name, its fields]``, bytes in base64. ``parse`` gives back what
``line`` was given, unless the line was cut.
"""

from __future__ import annotations

import json
from typing import Any, Final, get_args

import msgspec
import numpy as np

from kvass.core.effects import Event, Received
from kvass.messages import FindSegments, IndexChunks

MAX_CHARS: Final = 8 << 20
"""A longer line is cut in a log. The largest frame fits."""

_KINDS: Final[dict[str, type[Event]]] = {kind.__name__: kind for kind in get_args(Event)}


def line(now: float, event: Event, max_chars: int | None = MAX_CHARS) -> str:
    """One line of at most ``max_chars`` characters (and a remark, if it was cut). With a limit it
    is for a log: zeros stand in it for the tokens of prompts."""
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
    """When, and what. Raises ``ValueError`` for a line that was cut."""
    now, kind, fields = json.loads(text)
    event: Event = msgspec.convert(fields, _KINDS[kind], dec_hook=_array)
    return now, event


def _plain(value: Any) -> Any:
    assert isinstance(value, np.ndarray), value
    return value.tolist()


def _array(kind: Any, value: Any) -> Any:
    return np.array(value, np.bool_)
