"""A run as the core saw it, as text: JSON lines that can be fed to the core again.

The first line is ``{"config": .., "roomy": ..}``; each other is ``[time, event's name, fields]``,
bytes in base64.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec

from kvass.core.effects import Event, Faulted, Lost, Opened, PopulatedTo, Received, Tick
from kvass.core.machine import CacheMachine, CoreConfig
from kvass.testing.witness import Witness

Traced = list[tuple[float, Event]]

_EVENTS: dict[str, type[Event]] = {
    e.__name__: e for e in (Opened, Received, Faulted, Lost, PopulatedTo, Tick)
}


def dump_trace(config: CoreConfig, roomy: bool, trace: Traced) -> Iterator[str]:
    """The lines of a trace."""
    yield json.dumps({"config": msgspec.to_builtins(config), "roomy": roomy})
    for now, event in trace:
        yield json.dumps([now, type(event).__name__, msgspec.to_builtins(event)])


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
    for line in lines[1:]:
        now, kind, fields = json.loads(line)
        event: Event = msgspec.convert(fields, _EVENTS[kind])
        effects = machine.step(event, now)
        machine.validate()
        witness.observe(event, effects, now)
        witness.compare(machine.status())
    if not witness.open:
        witness.quiet(machine.next_deadline(), machine.status())
