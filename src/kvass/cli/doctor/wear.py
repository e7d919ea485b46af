"""The check of ``kvass doctor`` how much the daemon writes to the disks of its tiers each day.

A drive is made for so many bytes: its capacity, times the drive writes per day of its data sheet,
times the days of its warranty.
"""

from __future__ import annotations

from typing import Final

from kvass.cli.doctor.finding import Finding, note, ok, shown
from kvass.cli.doctor.machine import Machine
from kvass.client.health import used_tiers

DAY_S: Final = 86_400
_LEAST_S: Final = 600
"""What a daemon wrote in less time says little about a day."""


def written_a_day(m: Machine) -> Finding:
    fields = m.daemon or {}
    disks = [t for t in used_tiers(fields.get("tiers", [])) if t["tier"].startswith("disk:")]
    if not disks:
        return ok("no daemon with a disk tier answers", "nothing is written to disks")
    up_s = float(fields.get("up_s", 0))
    if up_s < _LEAST_S:
        do = "run kvass doctor again when the daemon has served for a day"
        return note(f"the daemon has run for {up_s:.0f} s", "not known yet", do=do)
    days = {tier["tier"]: tier.get("stored_bytes", 0) / up_s * DAY_S for tier in disks}
    found = ", ".join(f"{shown(size)} a day to {name}" for name, size in days.items())
    return ok(
        f"{found}, at the average since the daemon's start",
        "whatever is stored in L1, once (--flush write_through)",
        "a drive of 3.84 TB with 1 drive write per day is made for 3.5 TiB a day, all writers",
    )
