"""What is kept of engines in shadow mode is bounded. The rest is in ``scripts/shadow.txt``."""

from __future__ import annotations

from kvass.core.clients.shadow_figures import MOST
from kvass.core.handlers.shadow import MOST_GONE
from kvass.messages import ShadowReport
from tests.core.rig import BOOT, Rig


def test_what_is_kept_of_engines_that_are_gone_is_bounded() -> None:
    rig = Rig()
    for number in range(MOST_GONE + 3):
        e = rig.engine(f"e{number}")
        rig.say(e.scheduler, ShadowReport(boot=BOOT, lookups=2, lookup_tokens=MOST))
        e.quit()
    assert len(rig.machine.state.shadow_gone) == MOST_GONE
    shown = rig.status["namespaces"][0]["shadow"]
    assert (shown["lookup_tokens"], shown["lookups"]) == (MOST, 2 * (MOST_GONE + 3))
