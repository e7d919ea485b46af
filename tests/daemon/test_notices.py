"""What an operator must know is where he looks, and not in a log alone."""

from __future__ import annotations

import re
from pathlib import Path

import kvass
from kvass.client.health import notes, troubles
from kvass.daemon.notices import Notices

ENOUGH = {
    "cli/serve.py": (
        2,
        "who reads no ready line; a web process that ended is gone from its port",
    ),
    "daemon/last_events.py": (2, "the daemon ends"),
    "daemon/live.py": (1, "a SIGHUP without a file: that of a closed terminal"),
    "daemon/loop.py": (2, "the daemon ends"),
    "daemon/notices.py": (2, "these are the notices"),
    "daemon/peer_process.py": (1, "what rests since the last daemon, and until when"),
    "daemon/connection_log.py": (1, "an L1 that is too small is a note of client/health.py"),
    "daemon/tier_process/executor.py": (6, "a tier that is down, and its last error; its end"),
    "daemon/tier_process/supervisor.py": (5, "a tier that is down, and why; its restarts"),
    "tiers/disk/tier.py": (
        5,
        "lacking_bytes, full, too_large, damaged; files that stay are tried again",
    ),
    "tiers/disk/write_budget.py": (2, "a count of a budget that begins anew"),
    "tiers/encrypted.py": (1, "other_keys"),
    "tiers/key_file.py": (1, "not seen elsewhere: the keys in use stay the old ones"),
    "tiers/mooncake/client.py": (1, "a slower way of copying"),
    "tiers/refusals.py": (1, "refused_records, refusals"),
    "tiers/mooncake/tier.py": (1, "its stores fail"),
    "web/access.py": (2, "not seen elsewhere: the token in use stays the old one; no TLS"),
    "web/server.py": (1, "the request is answered with 500"),
    "web/source.py": (1, "a gap in the dashboard's history"),
}
"""By file, how many log calls at WARNING or above it has, and where else that is seen."""

CALL = re.compile(r"\b_?log\.(?:warning|error|exception|critical)\(|logging\.WARNING,")


def test_no_warning_is_in_the_log_alone() -> None:
    """Those of engines are in engines' logs, and not looked at here."""
    source = Path(kvass.__file__).parent
    found = dict[str, int]()
    for path in source.rglob("*.py"):
        name = str(path.relative_to(source))
        if name.startswith(("cli/", "core/", "daemon/", "tiers/", "web/")):
            calls = CALL.findall(path.read_text())
            found |= {name: len(calls)} if calls else {}
    assert found == {name: count for name, (count, _) in ENOUGH.items()}, "see daemon/notices.py"


def test_a_notice_stands_until_it_is_over_or_replaced() -> None:
    notices = Notices()
    notices.note("a", "first")
    notices.note("a", "second")
    notices.problem("b", "bad")
    assert (troubles(notices.fields()), notes(notices.fields())) == (["bad"], ["second"])
    for subject in ("a", "b", "never said"):
        notices.over(subject)
    assert notices.fields() == {"problems": [], "notes": []}
