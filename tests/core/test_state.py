"""What the state remembers beside rows, and with what it begins."""

from __future__ import annotations

from kvass.core.state import CoreConfig, State
from kvass.types import Quota
from tests.core.rig import Rig
from tests.core.rows import spec


def test_engines_that_are_refused_are_named_until_they_register() -> None:
    rig = Rig()
    for name in range(10):
        rig.register(rig.open(), f"e{name}", rank=0, ranks=1, world_size=2, shard=5)
    rig.wait(3.0)
    refused = {r["instance"]: (r["text"], r["age_s"]) for r in rig.status["refusals"]}
    assert list(refused) == [f"e{name}" for name in range(2, 10)]
    assert refused["e9"][1] == 3.0
    assert refused["e9"][0] == "world_size: 2 is not in 1..1"
    rig.engine("e9")
    assert "e9" not in {r["instance"] for r in rig.status["refusals"]}


def test_an_extent_is_64_mib_or_a_64th_of_a_small_arena() -> None:
    sizes = []
    for arena in (1 << 20, 64 << 30):
        made = State(CoreConfig(b"boot", arena))
        sizes.append(made.classes.add(spec(row_bytes=1024), namespace=1).slots_per_set * 1024)
    assert sizes == [(1 << 20) // 64, 64 << 20]


def test_quotas_of_the_start_are_in_force() -> None:
    made = State(CoreConfig(b"boot", 1 << 20, quotas=(Quota("a", reserved_bytes=1 << 19),)))
    assert made.tenants.all["a"].reserved_bytes == 1 << 19
