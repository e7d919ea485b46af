"""Traces: the events that a core saw, as JSON lines that can be fed to a core again.

The first line is ``{"config": .., "roomy": ..}``, every other one an event
(``core/event_lines.py``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec

from kvass.core.effects import Event
from kvass.core.event_lines import line, parse
from kvass.core.machine import CacheMachine, CoreConfig
from tests.support.witness.witness import Witness

Traced = list[tuple[float, Event]]


def dump_trace(config: CoreConfig, roomy: bool, trace: Traced) -> Iterator[str]:
    """The lines of a trace."""
    yield json.dumps({"config": msgspec.to_builtins(config), "roomy": roomy})
    for now, event in trace:
        yield line(now, event, max_chars=None)


def replay(lines: list[str]) -> None:
    """Feed a trace to the core and a witness again.

    Raises:
        AssertionError: the law that the recorded run broke, if it still does.
    """
    head = json.loads(lines[0])
    config = msgspec.convert(head["config"], CoreConfig)
    machine = CacheMachine(config)
    witness = Witness(config, roomy=head["roomy"])
    for text in lines[1:]:
        now, event = parse(text)
        effects = machine.step(event, now)
        machine.validate()
        witness.observe(event, effects, now, machine.next_deadline())
        witness.state.compare(machine.status())
    if not witness.sessions.sessions and not witness.state.ops:
        witness.state.quiet(machine.next_deadline(), machine.status())
