"""A run as the core saw it, as text: JSON lines that can be fed to the core again.

The first line is ``{"config": .., "roomy": ..}``; each other is ``[time, event's name, fields]``,
bytes in base64.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from kvass.core.effects import (
    Emptied,
    EpochIs,
    Event,
    Faulted,
    Loaded,
    Lost,
    Opened,
    PopulatedTo,
    Probed,
    ProcessEnded,
    Received,
    Stopping,
    Stored,
    Tick,
    TierReport,
)
from kvass.core.machine import CacheMachine, CoreConfig
from kvass.testing.witness import Witness

Traced = list[tuple[float, Event]]

_EVENTS: dict[str, type[Event]] = {
    e.__name__: e
    for e in (
        *(Opened, Received, Faulted, Lost, ProcessEnded, PopulatedTo, Tick, Stopping),
        *(Probed, Loaded, Stored, EpochIs, Emptied, TierReport),
    )
}


def _plain(value: Any) -> Any:
    assert isinstance(value, np.ndarray), value
    return value.tolist()


def _array(kind: Any, value: Any) -> Any:
    return np.array(value, np.bool_)


def dump_trace(config: CoreConfig, roomy: bool, trace: Traced) -> Iterator[str]:
    """The lines of a trace."""
    yield json.dumps({"config": msgspec.to_builtins(config), "roomy": roomy})
    for now, event in trace:
        yield json.dumps([now, type(event).__name__, msgspec.to_builtins(event, enc_hook=_plain)])


def replay(lines: list[str]) -> None:
    """Feed a trace to the core and a witness again.

    Raises:
        AssertionError: the law that the recorded run broke, if it still does.
    """
    head = json.loads(lines[0])
    config = msgspec.convert(head["config"], CoreConfig)
    machine = CacheMachine(config)
    witness = Witness(
        config.boot, config.arena_bytes, config.timing, config.limits, roomy=head["roomy"]
    )
    witness.watch(config.tiers, config.retain_promoted, config.weigh_loads)
    for line in lines[1:]:
        now, kind, fields = json.loads(line)
        event: Event = msgspec.convert(fields, _EVENTS[kind], dec_hook=_array)
        effects = machine.step(event, now)
        machine.validate()
        witness.observe(event, effects, now)
        witness.compare(machine.status())
    if not witness.open and not witness.ops:
        witness.quiet(machine.next_deadline(), machine.status())
