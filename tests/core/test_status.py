"""Bytes in, bytes evicted and whether they were of use, why lookups missed, and for how long.

``invariants`` checks the sums after every event: hits and misses are what was asked for, and what
came in and did not leave is there.
"""

from __future__ import annotations

from kvass import messages as m
from kvass.core.effects import TierReport
from kvass.types import PAGE
from tests.core.rig import Rig
from tests.core.tier_rig import TierRig


def test_what_a_tiers_process_reports_changes_none_of_our_own_figures() -> None:
    rig = TierRig()
    rig.ready()
    (ours,) = rig.status["tiers"]
    rig.step(TierReport(0, {**dict.fromkeys(ours, "wrong"), "up": False, "records": 3}))
    assert rig.status["tiers"] == [ours | {"up": False, "records": 3}]


def test_status_tells_the_public_fields(rig: Rig) -> None:
    e = rig.engine()
    e.store("a")
    e.lookup("a")
    fields = rig.ask(rig.open(), m.Status(seq=3)).fields
    assert (fields["leases"], fields["pins"], fields["rows"]) == (1, 1, 1)
    assert (fields["reservations"], fields["rows_loading"], fields["quarantined_bytes"]) == (
        0,
        0,
        0,
    )
    assert (fields["l1_used_bytes"], fields["l1_capacity_bytes"]) == (PAGE, 64 * PAGE)
    assert fields["namespaces"][0]["groups"][0]["rows"] == 1


def test_the_fields_of_a_namespace_are_shown_to_who_asks_for_them() -> None:
    rig = Rig()
    one = rig.engine("one", identity={"model": "m", "dtype": "bf16"})
    rig.engine("two", identity={"model": "m", "dtype": "fp8"})
    asker = rig.open()
    shown = rig.ask(asker, m.Status(seq=4)).fields["namespaces"]
    assert not any("terms" in ns for ns in shown)
    digests = (b"of none", one.namespace)
    first, second = rig.ask(asker, m.Status(seq=4, terms_of=digests)).fields["namespaces"]
    assert "terms" not in second
    assert first["terms"] == {
        "model": "m",
        "dtype": "bf16",
        "chunk_tokens": "16",
        "ranks": "1",
        "world_size": "1",
        "layer group 0": "full, blocks of 16 tokens, window of 0, shards of [4096] bytes",
    }
    rig.register(one.scheduler, "one", identity={"model": "m", "dtype": "bf16"}, generation=b"\x07")
    moved = rig.ask(asker, m.Status(seq=4)).fields["engines"][0]["namespace"]
    found = rig.ask(asker, m.Status(seq=4, terms_of=(bytes.fromhex(moved),))).fields["namespaces"]
    assert [ns["terms"]["generation"] for ns in found if "terms" in ns] == ["07"]
