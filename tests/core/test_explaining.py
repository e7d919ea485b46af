"""The messages of explanations: what an engine adds, and what the daemon answers."""

from __future__ import annotations

from typing import Any

from kvass import messages as m
from kvass.core.clients.lookup_log import ENTRIES
from tests.core.rig import BOOT, Engine, Rig


def entries(rig: Rig, **fields: Any) -> list[dict[str, Any]]:
    """What ``kvass explain`` gets."""
    return list(rig.ask(rig.open(), m.Explain(seq=3, **fields)).lookups)


def last(rig: Rig) -> dict[str, Any]:
    return entries(rig)[-1]


def note(engine: Engine, why: str, request: str = "r", **fields: Any) -> list[Any]:
    each = m.LookupNote(request=request, why=why, **fields)
    return engine.rig.say(engine.scheduler, m.LookupNotes(boot=BOOT, notes=(each,)))


def test_an_engine_adds_what_the_daemon_could_not_see(rig: Rig) -> None:
    e = rig.engine()
    rig.wait(5.0)
    assert note(e, "no_daemon", when_s=rig.now - 4.0, prompt_tokens=100, local_tokens=32) == []
    entry = last(rig)
    assert (entry["why"], entry["age_s"], entry["prompt_tokens"]) == ("no_daemon", 4.0, 100)
    assert (entry["end_token"], entry["hit_tokens"]) == (32, 0)
    note(e, "no_daemon", "later", when_s=rig.now + 100.0)
    assert last(rig)["age_s"] == 0.0, "no time that is still to come"
    note(e, "w" * 600, detail="d" * 600, when_s=rig.now)
    assert (len(last(rig)["why"]), len(last(rig)["detail"])) == (64, 512)


def test_a_note_that_is_refused_leaves_the_others(rig: Rig) -> None:
    e = rig.engine()
    notes = tuple(m.LookupNote(request=name, why="x") for name in ("a", "b" * 600, "c"))
    assert rig.say(e.scheduler, m.LookupNotes(boot=BOOT, notes=notes)) == []
    assert [entry["request"] for entry in entries(rig)] == ["a", "c"]
    assert rig.count("refused_bad_value") == 1


def test_a_question_is_bounded(rig: Rig) -> None:
    for limit in (0, -1, m.MOST_EXPLAINED + 1):
        assert rig.code(rig.open(), m.Explain(seq=3, limit=limit)) == "bad_value"
    e = rig.engine()
    for i in range(2 * ENTRIES):
        note(e, "no_daemon", f"r{i}")
    assert len(entries(rig, limit=m.MOST_EXPLAINED)) == ENTRIES
    assert [each["request"] for each in entries(rig, limit=2)] == ["r510", "r511"]
    assert entries(rig, engine="f") == []
    assert len(entries(rig, request="r51", limit=m.MOST_EXPLAINED)) == 2
