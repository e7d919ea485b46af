"""Law 11 and the handshake: who may speak, and how a connection ends."""

from __future__ import annotations

import pytest

from kvass import messages as m
from kvass.core.handlers import connections
from kvass.types import PAGE
from tests.core.rig import BOOT, Rig

# ---------------------------------------------------------------- handshake


def test_welcome_tells_boot_limits_and_timing(rig: Rig) -> None:
    connection = rig.open(hello=False)
    reply = rig.ask(connection, m.Hello(seq=4, clock_s=rig.now, features=("unheard-of",)))
    assert (reply.seq, reply.boot, reply.version, reply.clock_s) == (4, BOOT, "test", rig.now)
    assert (reply.arena_bytes, reply.features) == (64 * PAGE, ())
    assert reply.limits == rig.machine.state.config.limits
    assert reply.timing == rig.machine.state.config.timing


@pytest.mark.parametrize(
    ("theirs", "both"), [((), ()), (("a",), ("a",)), (("b", "later"), ("b",)), (("later",), ())]
)
def test_a_feature_is_used_if_both_sides_name_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, theirs: tuple[str, ...], both: tuple[str, ...]
) -> None:
    """No feature exists yet: these are made up."""
    monkeypatch.setattr(connections, "FEATURES", ("a", "b"))
    connection = rig.open(hello=False)
    reply = rig.ask(connection, m.Hello(seq=4, clock_s=rig.now, features=theirs))
    assert reply.features == rig.machine.state.connections[connection].features == both


@pytest.mark.parametrize(("low", "meets"), [(1, 1), (2, None)])
def test_a_client_that_names_no_version_range_speaks_protocol_1(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, low: int, meets: int | None
) -> None:
    """A range that is not said means what it meant when there was one protocol only."""
    monkeypatch.setattr(connections, "PROTOCOL_MIN", low)
    monkeypatch.setattr(connections, "PROTOCOL_MAX", 3)
    reply = rig.ask(rig.open(hello=False), m.Hello(seq=1, clock_s=rig.now))
    if meets is not None:
        assert reply.protocol == meets
    else:
        assert reply.code == "incompatible_version"
        assert f"{low}..3" in reply.text
        assert "1..1" in reply.text
    both = m.Hello(seq=1, clock_s=rig.now, protocol_min=1, protocol_max=9)
    assert rig.ask(rig.open(hello=False), both).protocol == 3
