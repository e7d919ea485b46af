"""Why a lookup did not match more: each reason is caused, and then told by the daemon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvass import messages as m
from kvass.core import explain
from kvass.core.effects import TierProbe, TierReport
from kvass.types import PAGE
from tests.core.groups import FULL, SHORT
from tests.core.groups import engine as engine_of
from tests.core.rig import GRACE_S, Engine, Rig, digests, layout
from tests.core.test_blocks import full, lookup, store
from tests.core.test_plan import measured
from tests.core.test_tenants import divided, quota
from tests.core.tier_rig import TierRig

CHUNK = 16


def entries(rig: Rig, **fields: Any) -> list[dict[str, Any]]:
    """What ``kvass explain`` gets."""
    return list(rig.ask(rig.open(), m.Explain(seq=3, **fields)).lookups)


def last(rig: Rig) -> dict[str, Any]:
    return entries(rig)[-1]


def told(engine: Engine, *names: object, **fields: Any) -> tuple[str, str, int]:
    """The reason, the cause and the end of the match of a lookup, whose match is given back."""
    found = engine.lookup(*names, **fields)
    if found.lease:
        engine.give_back(found.lease)
    entry = last(engine.rig)
    assert entry["why"] == found.why
    return entry["why"], entry["cause"], entry["end_token"]


def test_all_that_can_match_did_and_what_nobody_stored_did_not(rig: Rig) -> None:
    e = rig.engine()
    e.store("a", "b")
    assert told(e, "a", "b") == ("", "", 2 * CHUNK)
    assert told(e, "a", "b", "c") == ("absent", "", 2 * CHUNK)
    assert told(e, "x") == ("absent", "", 0)
    assert told(e, "a", "b", "c", first=1, prompt_tokens=50, local_tokens=20)[2] == 2 * CHUNK
    entry = last(rig)
    assert (entry["prompt_tokens"], entry["local_tokens"], entry["hit_tokens"]) == (50, 20, 12)
    assert entry["asked_tokens"] == 2 * CHUNK
    assert (entry["engine"], entry["model"], entry["request"]) == ("e", "m", "r")


def test_an_evicted_row_says_when_and_for_whom() -> None:
    rig = Rig(pages=4, extent=1, instance_write_share=1.0)
    e = rig.engine()
    e.store("a")
    e.store("b", "c", "d")
    rig.wait(5.0)
    e.store("e")
    rig.wait(60.0)
    assert told(e, "a") == ("evicted", "capacity", 0)
    assert last(rig)["left_s"] == 60.0
    assert last(rig)["kind"] == "full"
    rig.engine("f", layout=layout(4)).store("big")
    assert told(e, "e")[:2] == ("evicted", "handed_over")
    (ns, _) = rig.status["namespaces"]
    assert ns["miss_tokens"]["evicted"] == 2 * CHUNK
    assert told(e, "e", "x")[2] == 0
    rig.wait(1.0)
    e.store("e")
    assert told(e, "e") == ("", "", CHUNK), "it is there again"


def test_the_deepest_chunk_goes_first_and_ends_the_match() -> None:
    rig = Rig(pages=4, extent=1, instance_write_share=1.0)
    e = rig.engine()
    e.store("a", "b", "c")
    e.store("x", "y")
    assert told(e, "a", "b", "c") == ("evicted", "capacity", 2 * CHUNK)


def test_a_tenant_that_has_no_more_room() -> None:
    rig = divided(quota("small", cap=2))
    e = rig.engine()
    for name in "abc":
        e.store(name, tenant="small")
    assert told(e, "a") == ("over_quota", "quota", 0)
    rig = divided(quota("small", cap=2))
    e = rig.engine()
    e.store("a", tenant="small")
    e.store("b", tenant="other")
    assert told(e, "a")[0] == told(e, "b")[0] == "", "the control"


def test_a_row_that_was_cleared(rig: Rig) -> None:
    e = rig.engine()
    e.store("a", "b")
    rig.ask(rig.open(), m.Clear(seq=3, everything=True))
    rig.finish()
    assert told(e, "a", "b") == ("cleared", "cleared", 0)
    e.store("c")
    e.clear()
    rig.finish()
    assert told(e, "c") == ("cleared", "reset", 0)
    assert told(e, "never") == ("absent", "", 0)


def test_a_row_that_was_read_while_it_was_cleared(rig: Rig) -> None:
    e = rig.engine()
    e.store("a")
    held = e.lookup("a")
    rig.ask(rig.open(), m.Clear(seq=3, everything=True))
    e.give_back(held.lease)
    rig.finish()
    assert told(e, "a") == ("cleared", "cleared", 0)


def test_weights_that_were_replaced_and_a_namespace_that_was_forgotten() -> None:
    rig = Rig(namespaces=2)
    e = rig.engine()
    e.store("a")
    rig.register(e.scheduler, "e", generation=b"new")
    why, _, _ = told(e, "a")
    assert why == "other_namespace"
    assert last(rig)["detail"] == "generation: weights replaced while it ran, not (absent)"
    e.store("b")
    rig.register(e.scheduler, "e", generation=b"newer")
    rig.finish()
    assert told(e, "b") == ("absent", "", 0), "in this namespace"


def test_a_namespace_that_made_way_for_another_and_came_back() -> None:
    rig = Rig(namespaces=2)
    for name in "abc":
        e = rig.engine(name, identity={"model": name})
        e.store("x")
        e.quit()
        rig.finish()
    assert len(rig.status["namespaces"]) == 2
    e = rig.engine("d", identity={"model": "d"})
    assert told(e, "x")[0] == "other_namespace", "nothing of a namespace that had its place"
    e.quit()
    e = rig.engine("a", identity={"model": "a"})
    assert told(e, "x") == ("cleared", "forgotten", 0)


def test_a_store_that_did_not_finish_and_one_that_was_refused(rig: Rig) -> None:
    e = rig.engine()
    grant = e.begin("a")
    e.abort(grant.reservation, rank=0)
    assert told(e, "a") == ("not_stored", "unfinished", 0)
    e.store("a")
    assert told(e, "a") == ("", "", CHUNK)
    rig = Rig(pages=4, extent=1, instance_write_share=0.5)
    e = rig.engine()
    grant = e.begin("a", "b", "c")
    e.commit(grant.reservation)
    assert told(e, "a", "b", "c") == ("not_stored", "refused", 2 * CHUNK)


def test_a_writer_that_was_lost(rig: Rig) -> None:
    e = rig.engine()
    e.begin("a")
    rig.lose(*e.workers)
    rig.wait(GRACE_S + 1)
    again = rig.open()
    rig.register(again, rank=0)
    assert told(e, "a")[:2] == ("not_stored", "unfinished")


def test_another_namespace_has_it_and_the_differing_field_is_named(rig: Rig) -> None:
    old = rig.engine("old", identity={"model": "m", "dtype": "bf16", "tp": "1"})
    rig.engine("mid", identity={"model": "m", "dtype": "fp16", "tp": "2"}).store("a", "b")
    new = rig.engine("new", identity={"model": "m", "dtype": "fp8", "tp": "1"})
    old.store("a", "b")
    assert told(new, "a", "b") == ("other_namespace", "", 0)
    assert last(rig)["detail"] == "dtype: fp8, not bf16", "of the most similar one"
    new.store("a")
    assert told(new, "a", "b") == ("other_namespace", "", CHUNK)
    assert told(new, "x") == ("absent", "", 0), "the control"


def test_another_type_of_engine_is_one_difference_and_never_the_most_similar(rig: Rig) -> None:
    """Its fields have other names, so a list of them would say nothing."""
    others = {f"setting_{i}": "x" for i in range(9)}
    hf = {"model": "m", "engine": "transformers 5.3, torch 2.12"} | others
    first = rig.engine("hf", identity=hf)
    vllm = {"model": "m", "engine": "vllm 0.33"}
    second = rig.engine("one", identity=vllm | {"dtype": "fp8", "tp": "1"})
    third = rig.engine("two", identity=vllm | {"dtype": "bf16", "tp": "2"})
    later = rig.engine("later", identity=vllm | {"engine": "vllm 0.32"} | {"dtype": "fp8"})
    spaces = {bytes.fromhex(ns["namespace"]): ns for ns in rig.status["namespaces"]}
    said = [spaces[e.namespace] for e in (second, third, later)]
    assert said[0]["differs_in"] == ["the engine type: vllm, not transformers"]
    assert said[0]["like"] == first.namespace.hex()
    assert said[1]["differs_in"] == ["dtype: bf16, not fp8", "tp: 2, not 1"]
    assert said[2]["differs_in"] == ["engine: vllm 0.32, not vllm 0.33", "tp: (absent), not 1"]
    first.store("a")
    assert told(second, "a")[0] == "other_namespace"
    assert last(rig)["detail"] == "the engine type: vllm, not transformers"
    third.store("a")
    assert told(second, "a")[0] == "other_namespace"
    assert last(rig)["detail"] == "dtype: fp8, not bf16; tp: 1, not 2"


def test_what_the_engine_knows_counts_if_the_daemon_knows_nothing(rig: Rig) -> None:
    e = rig.engine()
    e.store("a")
    hint = {"if_absent": "other_salt", "absent_chunk": 0}
    assert told(e, "x", **hint)[0] == "other_salt"
    assert told(e, "a", "x", **hint)[0] == "absent", "the match ended elsewhere"
    assert told(e, "a", "x", if_absent="engine_busy", absent_chunk=1)[0] == "engine_busy"
    assert told(e, "a", **hint)[0] == ""
    assert told(e, "x", if_absent="of a newer engine")[0] == "absent"
    (ns,) = rig.status["namespaces"]
    assert ns["miss_tokens"]["other_salt"] == CHUNK


def test_a_row_of_a_window_that_is_missing_ends_the_match() -> None:
    e = engine_of(FULL, SHORT)
    e.store("a", "b", groups=3)
    window = e.rig.machine.state.namespaces[0].classes[1]
    allocator = e.rig.machine.state.allocator
    allocator._evict(window, window.index.rows(), "capacity")
    assert told(e, "a", "b") == ("evicted", "capacity", 0)
    assert last(e.rig)["kind"] == "sliding_window"


def test_blocks_of_a_tail(rig: Rig) -> None:
    e = rig.engine(layout=full(4))
    store(e, "abcdef")
    found = lookup(e, "abcdef")
    e.give_back(found.lease)
    assert (found.why, last(rig)["end_token"]) == ("", 24)
    found = lookup(e, "abcdefg")
    e.give_back(found.lease)
    assert (found.why, last(rig)["end_token"]) == ("absent", 24)
    first = lookup(e, "abcdefgh")
    e.give_back(first.lease)
    assert (first.why, last(rig)["end_token"]) == ("absent", 16)
    again = lookup(e, "abcdefg", again=True)
    e.give_back(again.lease)
    assert (again.why, last(rig)["why"]) == ("", "absent")
    assert (last(rig)["end_token"], last(rig)["hit_tokens"]) == (24, 24), "one entry"


def test_an_engine_without_a_rank_and_a_prompt_that_is_too_long() -> None:
    rig = Rig(keys_per_message=2)
    session = rig.open()
    rig.register(session)
    message = m.Lookup(seq=7, request="r", digests=digests("a"), width=8)
    assert rig.ask(session, message).why == last(rig)["why"] == "ranks_missing"
    rig = Rig(keys_per_message=4)
    e = rig.engine(layout=layout(1, 1))
    e.store("a", "b", groups=3)
    assert told(e, "a", "b", "c") == ("too_long", "", 2 * CHUNK)
    assert told(e, "a", "x", "c") == ("absent", "", CHUNK)


# ---------------------------------------------------------------- tiers


def _down(rig: TierRig, e: Engine) -> None:
    rig.down = True
    rig.step(TierReport(0, {"up": False}))


def _late(rig: TierRig, e: Engine) -> None:
    rig.begin(e, "a", "b", budget_ms=1000)
    rig.answer_all(TierProbe)
    rig.wait(1.5)
    rig.answer_all()


def _fails(rig: TierRig, e: Engine) -> None:
    rig.begin(e, "a", "b", budget_ms=1000)
    rig.answer_all(TierProbe)
    rig.shelves[0].clear()


@pytest.mark.parametrize(
    ("why", "cause_it"), [("tier_down", _down), ("late", _late), ("load_failed", _fails)]
)
def test_tiers(why: str, cause_it: Callable[[TierRig, Engine], None]) -> None:
    rig = TierRig()
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b")
    cause_it(rig, e)
    if why == "tier_down":
        rig.begin(e, "a", "b", budget_ms=1000)
    rig.answer_all()
    (found,) = rig.replies(e.scheduler)
    assert found.why == last(rig)["why"] == why
    assert last(rig)["detail"] == ("tier0" if why == "tier_down" else "")
    if why == "late":
        assert last(rig)["waited_s"] == 1.5
    if why == "load_failed":
        rig.look_up(e, "a", "b")
        assert last(rig)["why"] == why, "and it is remembered"


def test_dearer_than_computing_and_too_many_that_wait() -> None:
    rig, e = measured(weigh=True)
    (found,) = rig.look_up(e, "a", "b", prefill_tokens_s=1_000_000.0)
    assert found.why == last(rig)["why"] == "not_worth_it"
    rig = TierRig(waiting_bytes=0)
    e = rig.ready()
    (found,) = rig.look_up(e, "a")
    assert found.why == last(rig)["why"] == "not_waited"


def test_a_clear_while_it_waits_and_a_row_that_was_not_kept() -> None:
    rig = TierRig(core={"retain_promoted": False})
    e = rig.ready()
    rig.only_in_tiers(e, "a")
    rig.begin(e, "a", budget_ms=1000)
    rig.say(rig.open(), m.Clear(seq=3, everything=True))
    assert [reply.why for reply in rig.replies(e.scheduler)] == ["cleared"]
    rig.answer_all()
    rig.only_in_tiers(e, "b")
    (found,) = rig.look_up(e, "b")
    e.give_back(found.lease)
    rig.shelves[0].clear()
    (found,) = rig.look_up(e, "b")
    assert (found.why, last(rig)["cause"]) == ("evicted", "not_retained")


def test_many_namespaces_cost_a_bounded_search(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(pages=256, extent=1)
    rig.engine("first", identity={"model": "m", "n": "first"}).store("a")
    for i in range(explain.NAMESPACES):
        rig.engine(f"e{i}", identity={"model": "m", "n": str(i)}).store("x")
    e = rig.engine("new", identity={"model": "m", "n": "new"})
    assert told(e, "a")[0] == "absent"
    monkeypatch.setattr(explain, "NAMESPACES", explain.NAMESPACES + 1)
    assert told(e, "a")[0] == "other_namespace"
    assert rig.status["l1_used_bytes"] <= 256 * PAGE


def test_what_was_cleared_with_its_tenant_was_cleared() -> None:
    rig = divided(quota("a"), quota("b"))
    e = rig.engine()
    for name in ("free", "read"):
        e.store(name, tenant="a")
    e.lookup("read")  # its lease keeps the row, but not its match
    begun = e.begin("begun", tenant="a")
    rig.ask(rig.open(), m.ClearTenant(seq=9, tenant="a"))
    e.commit(begun.reservation)
    for name in ("free", "read", "begun"):
        assert told(e, name, tenant="a")[:2] == ("cleared", "cleared"), name
