"""The last lookups of each engine: bounded, merged where nothing changed, found by name."""

from __future__ import annotations

from typing import Any

from kvass.core.clients.lookup_log import ENGINES, ENTRIES, LookupEntry, LookupLog
from kvass.core.clients.registry import Instance
from kvass.messages import Register


def entry(request: str, when: float = 1.0, **fields: Any) -> LookupEntry:
    return LookupEntry(request, when, **fields)


def engine(instance: str = "e", model: str = "m") -> Instance:
    return Instance(
        instance, Register(instance=instance, identity={"model": model}, chunk_tokens=1)
    )


def names(log: LookupLog, engine: str = "", request: str = "", limit: int = 1000) -> list[str]:
    return [each["request"] for each in log.fields(engine, request, limit, now=10.0)]


def test_an_engine_keeps_its_last_entries() -> None:
    log = LookupLog()
    for i in range(2 * ENTRIES):
        log.of(engine()).add(entry(f"r{i}", float(i)))
    assert names(log) == [f"r{i}" for i in range(ENTRIES, 2 * ENTRIES)]
    only = log.of(engine())
    assert only.last("r0") is None
    assert names(log, limit=1) == [f"r{2 * ENTRIES - 1}"]


def test_a_request_that_comes_again_is_one_entry_unless_something_changed() -> None:
    log = LookupLog()
    for when, why in ((1.0, "absent"), (2.0, "absent"), (3.0, ""), (4.0, "absent")):
        log.of(engine()).add(entry("r", when, why=why))
    found = log.fields("", "", 10, now=10.0)
    assert [(each["why"], each["age_s"], each["times"]) for each in found] == [
        ("absent", 8.0, 2),
        ("", 7.0, 1),
        ("absent", 6.0, 1),
    ]


def test_the_last_entry_of_a_request_is_found() -> None:
    log = LookupLog()
    log.of(engine()).add(entry("r", 1.0, why="absent"))
    log.of(engine()).add(entry("r", 2.0, why=""))
    for i in range(8):
        log.of(engine()).add(entry(f"r{i}"))
    found = log.of(engine()).last("r")
    assert found is not None
    assert found.when == 2.0


def test_engines_are_bounded_and_the_one_that_was_quiet_longest_goes() -> None:
    log = LookupLog()
    for i in range(ENGINES):
        log.of(engine(f"e{i}", "m")).add(entry("r", float(i)))
    log.of(engine("e0", "m")).add(entry("r", 1000.0))
    log.of(engine("new", "m")).add(entry("r", 1001.0))
    assert len(log.engines) == ENGINES
    assert "e1" not in log.engines
    assert {"e0", "new"} <= log.engines.keys()


def test_entries_are_found_by_engine_model_and_request() -> None:
    log = LookupLog()
    log.of(engine("abc-1", "qwen")).add(entry("cmpl-1-0-deadbeef", 1.0))
    log.of(engine("abd-2", "llama")).add(entry("cmpl-2-0-deadbeef", 2.0))
    assert names(log, engine="abc") == ["cmpl-1-0-deadbeef"]
    assert names(log, engine="llam") == ["cmpl-2-0-deadbeef"]
    assert names(log, engine="ab") == names(log) == ["cmpl-1-0-deadbeef", "cmpl-2-0-deadbeef"]
    assert names(log, request="cmpl-2") == ["cmpl-2-0-deadbeef"]
    assert names(log, engine="bc") == []
