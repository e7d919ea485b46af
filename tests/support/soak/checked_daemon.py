"""``kvass serve`` that checks the core's invariants all the time: a broken one ends the daemon.

It and the processes of its tiers tell how much memory they have in use (``memory``). It keeps the
lookups of few engines: those of 32, as usual, are 60,000 objects that come within a quarter of an
hour, and would look like a leak.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Final
from unittest import mock

from kvass.cli.main import main
from kvass.core import invariants
from kvass.core.clients import lookup_log
from kvass.core.effects import Effect, Event
from kvass.core.machine import CacheMachine
from tests.support.soak.memory import tell

EVERY_S: Final = 0.25
ENGINES: Final = 2
_step = CacheMachine.step
_checked_s = 0.0


def _checked_step(machine: CacheMachine, event: Event, now: float) -> list[Effect]:
    global _checked_s
    effects = _step(machine, event, now)
    if time.monotonic() > _checked_s + EVERY_S:
        machine.validate()
        _checked_s = time.monotonic()
    return effects


if __name__ == "__main__":
    folder = Path(sys.argv[sys.argv.index("--socket") + 1]).parent
    tell(folder)
    os.environ["SOAK_FOLDER"] = str(folder)
    sys.path.insert(0, str(Path(__file__).parent / "site"))  # of tiers, too; Debian has one itself
    with (
        mock.patch.object(CacheMachine, "step", _checked_step),
        mock.patch.object(lookup_log, "ENGINES", ENGINES),
        mock.patch.object(invariants, "ENGINES", ENGINES),
    ):
        raise SystemExit(main())
