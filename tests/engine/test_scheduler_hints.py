"""What a request says of its own KV, with vLLM's real schedulers: how much of it is stored."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from kvass.connectors.vllm.hints import (
    MOST_LOADED,
    MOST_TOKENS,
    NO_HINTS,
    REPORT,
    SESSION,
    SKIP_LOAD,
    SKIP_SAVE,
    TENANT,
    THEN,
    TTL,
    VLLM_MOST_LOADED,
    Hints,
    read_hints,
)
from kvass.types import session_tag
from tests.support.vllm.fake_client import FakeClient
from tests.support.vllm.scheduler import (
    BLOCK,
    CHUNK,
    SchedulerHarness,
    make_configs,
    read_setup,
    rig,
)

PROMPT = 100


def stored_tokens(client: FakeClient) -> int:
    """How many first tokens of the only request were offered, by the hashes of its blocks."""
    items = [item for items in client.reserves for item in items]
    return max((item.first * CHUNK + len(item.blocks) // 32 * BLOCK for item in items), default=0)


def after(params: dict[str, Any] | None, answer: int = 1, **options: Any) -> int:
    """How many tokens of a prompt with these ``kv_transfer_params`` and its answer are stored."""
    client, world = rig(tails=True, **options)
    world.add("a", range(PROMPT), max_tokens=answer, params=params)
    world.run(client)
    return stored_tokens(client)


@pytest.mark.parametrize("batched", [512, 48])
@pytest.mark.parametrize("most", [0, 15, 16, 31, 32, 33, 48, 64, 95, 96, 100, 1000])
def test_the_first_tokens_are_stored_to_the_block(most: int, batched: int) -> None:
    assert after({MOST_TOKENS: most}, batched=batched) == min(most, PROMPT) // BLOCK * BLOCK


def test_an_answer_counts() -> None:
    assert after(None, answer=61) == 160
    assert after({MOST_TOKENS: 140}, answer=61) == 128
    assert after({MOST_TOKENS: 50}, answer=61) == 48


def test_what_may_not_be_stored_costs_later_steps_nothing() -> None:
    """The planner knows it for all steps, as it does between two chunks."""
    client, world = rig(tails=True)
    world.add("a", range(PROMPT), max_tokens=100, params={MOST_TOKENS: 40})
    for _ in range(4):
        world.step()
    planner = world.connector._planner.stores
    assert planner._quiet_steps > 100
    world.run(client)
    assert stored_tokens(client) == 32


@pytest.mark.parametrize("tails", [False, True])
def test_what_may_not_be_stored_does_not_count_as_lost(tails: bool) -> None:
    client, world = rig(tails=tails)
    world.add("a", range(PROMPT), max_tokens=60, params={MOST_TOKENS: 40})
    with mock.patch.object(world.connector._planner.traffic, "count") as count:
        world.run(client)
    assert client.reserves
    lost = [each.args[1] for each in count.call_args_list if each.args[0] == "unstored_requests"]
    assert not any(lost)


def test_lmcaches_word_for_no_store_is_known() -> None:
    assert after({SKIP_SAVE: True}) == 0
    assert after({SKIP_SAVE: False}) == 96


def test_a_bad_value_is_ignored_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client, world = rig(tails=True)
    world.tolerant = True
    with caplog.at_level(logging.WARNING, logger="kvass"):
        for name in "ab":
            world.add(name, range(PROMPT), max_tokens=1, params={MOST_TOKENS: "many"})
    world.run(client)
    assert stored_tokens(client) == 96
    assert world.connector._boundary.counters == {"bad_hint": 2}
    assert [r.getMessage() for r in caplog.records if "ignored" in r.getMessage()] == [
        "max_offload_tokens in kv_transfer_params: ignored"
    ]


@pytest.mark.parametrize(
    ("params", "hints"),
    [
        (None, NO_HINTS),
        ({}, NO_HINTS),
        ({"do_remote_decode": False}, NO_HINTS),
        ({MOST_TOKENS: 7, TENANT: "a"}, Hints("a", 7)),
        ({MOST_TOKENS: 7, SKIP_SAVE: True}, Hints("", 0)),
        ({MOST_TOKENS: -1}, Hints(bad=(MOST_TOKENS,))),
        ({MOST_TOKENS: True}, Hints(bad=(MOST_TOKENS,))),
        ({MOST_TOKENS: 1.5}, Hints(bad=(MOST_TOKENS,))),
        ({SKIP_SAVE: "yes"}, Hints(bad=(SKIP_SAVE,))),
        ({VLLM_MOST_LOADED: 7}, Hints(most_loaded=7)),
        ({VLLM_MOST_LOADED: 7, MOST_LOADED: 9}, Hints(most_loaded=9)),
        ({VLLM_MOST_LOADED: 7, MOST_LOADED: 0}, Hints(most_loaded=0)),
        ({VLLM_MOST_LOADED: 7, SKIP_LOAD: True}, Hints(most_loaded=0)),
        ({VLLM_MOST_LOADED: 7, SKIP_LOAD: False}, Hints(most_loaded=7)),
        ({VLLM_MOST_LOADED: 7, MOST_LOADED: "9"}, Hints(most_loaded=7, bad=(MOST_LOADED,))),
        ({VLLM_MOST_LOADED: False}, Hints(bad=(VLLM_MOST_LOADED,))),
        ({MOST_LOADED: -1, SKIP_LOAD: "yes"}, Hints(bad=(MOST_LOADED, SKIP_LOAD))),
        ({REPORT: True}, Hints(report=True)),
        ({REPORT: "yes", TENANT: ""}, Hints(bad=(REPORT,))),
        ({TTL: "5m"}, Hints(keep_s=300)),
        ({TTL: "24h"}, Hints(keep_s=86_400)),
        ({TTL: 90.5}, Hints(keep_s=90.5)),
        ({TTL: "25h"}, Hints(bad=(TTL,))),
        ({TTL: 86_401}, Hints(bad=(TTL,))),
        ({TTL: "0m"}, Hints(bad=(TTL,))),
        ({TTL: float("nan")}, Hints(bad=(TTL,))),
        ({TTL: "5 m"}, Hints(bad=(TTL,))),
        ({TTL: 0, SESSION: "s"}, Hints(session="s", ends=True)),
        ({TTL: False, SESSION: ""}, Hints(bad=(SESSION, TTL))),
        ({TTL: -1, SESSION: 7}, Hints(bad=(SESSION, TTL))),
        ({THEN: "5m", TTL: 7}, Hints(keep_s=7, then_s=300)),
        ({THEN: 0}, NO_HINTS),
        ({THEN: 0, TTL: 0}, Hints(ends=True)),
        ({THEN: 60, TTL: 0}, Hints(ends=True, bad=(THEN,))),
        ({THEN: "soon", TTL: "soon"}, Hints(bad=(TTL, THEN))),
        ({TENANT: ["a"]}, Hints(bad=(TENANT,))),
        ({TENANT: "not a name"}, Hints("other", bad=(TENANT,))),
    ],
)
def test_what_is_read(params: dict[str, Any] | None, hints: Hints) -> None:
    assert read_hints(params) == hints


@pytest.mark.parametrize(
    ("actions", "hints"),
    [
        ([("kv.deref", "1.0", {})], Hints(ends=True)),
        ([("kv.prefetch", "1.0", {})], NO_HINTS),
        ([("kv.evict", "1.0", {"include_current_request": True})], Hints(ends=True)),
        ([("kv.evict", "1.0", {"block_hashes": [1]})], Hints(unknown=("kv.evict",))),
        ([("kv.retain", "1.0", {"ttl_seconds": 30, "priority": 3})], Hints(keep_s=30)),
        ([("kv.retain", "1.2", {"directives": [{"priority": 9}]})], Hints(keep_s=86_400)),
        (
            [
                (
                    "kv.retain",
                    "1.0",
                    {
                        "directives": [
                            {"start": 0, "priority": 80, "duration": 60.0},
                            {"start": 0, "priority": 0, "duration": 900.0},
                            {"start": 32, "priority": 40, "duration": 1e9},
                        ]
                    },
                )
            ],
            Hints(keep_s=60),
        ),
        ([("kv.retain", "1.0", {"directives": "all"})], Hints(unknown=("kv.retain",))),
        ([("kv.retain", "1.0", {"ttl_seconds": float("nan")})], Hints(unknown=("kv.retain",))),
        ([("kv.retain", "2.0", {}), ("x" * 100, "1", {})], Hints(unknown=("kv.retain", "x" * 64))),
        ([("kv.fetch", "1.0", {})] * 70, Hints(unknown=("kv.fetch",) * 64)),
    ],
)
def test_known_actions_of_an_envelope_are_hints_and_the_others_are_counted(
    actions: list[tuple[str, str, Any]], hints: Hints
) -> None:
    made = [SimpleNamespace(action_type=t, action_version=v, payload=p) for t, v, p in actions]
    assert read_hints(None, SimpleNamespace(actions=made)) == hints


def test_what_a_request_says_itself_wins_over_an_envelope() -> None:
    action = SimpleNamespace(action_type="kv.deref", action_version="1.0", payload={})
    assert read_hints({TTL: 7}, SimpleNamespace(actions=[action])) == Hints(keep_s=7)


def test_vllms_envelope_is_read_from_its_requests() -> None:
    kv_hints = pytest.importorskip("vllm.v1.kv_hints", reason="since vLLM 0.31")
    actions = [kv_hints.KvHintAction(f"a{t}", t, "1.0", {}) for t in ("kv.deref", "kv.fetch")]
    client, world = rig(tails=True)
    world.tolerant = True
    envelope = kv_hints.KvHintsEnvelope("0.1", "m", actions)
    world.add("a", range(PROMPT), max_tokens=1, session="s", kv_hints=envelope)
    world.run(client)
    assert client.ended == [(session_tag("s"), "")]
    assert world.connector._boundary.counters == {"unknown_action": 1}


# ---------------------------------------------------------------- sessions


def tags(client: FakeClient) -> set[int]:
    """Of all lookups and offers."""
    return {
        *(context.session for context in client.contexts.values()),
        *(item.session for items in client.reserves for item in items),
    }


@pytest.mark.parametrize(
    ("params", "session", "name", "kind"),
    [
        ({SESSION: "s"}, None, "s", "session"),
        (None, "own", "own", "session"),
        ({SESSION: "s", TENANT: "t"}, "own", "s", "session"),
        ({TTL: 0}, None, "a", "request"),
        ({TTL: 0}, "own", "own", "session"),
        ({THEN: 5}, "own", "own", "session"),
        ({THEN: 5}, None, "a", "request"),
    ],
)
def test_a_session_is_named_in_all_that_is_asked_and_ends_if_the_request_says_so(
    params: dict[str, Any] | None, session: str | None, name: str, kind: Any
) -> None:
    client, world = rig(tails=True)
    world.add("a", range(PROMPT), max_tokens=60, params=params, session=session)
    world.run(client)
    params = params or {}
    tenant = params.get(TENANT, "")
    tag = session_tag(name, tenant, kind)
    assert tags(client) == {tag}
    assert {c.then_s for c in client.contexts.values()} == {params.get(THEN, 0)}
    assert client.ended == ([(tag, tenant)] if TTL in params else [])


def test_an_aborted_request_ends_its_session_too() -> None:
    client, world = rig(tails=True)
    world.add("a", range(PROMPT), max_tokens=60, params={TTL: 0}, session="s")
    world.step()
    assert not client.ended
    world.abort("a")
    assert client.ended == [(session_tag("s"), "")]


def test_without_a_session_nothing_is_named() -> None:
    client, world = rig(tails=True)
    world.add("a", range(PROMPT), max_tokens=60)
    world.run(client)
    assert tags(client) == {0}


# ---------------------------------------------------------------- generated tokens


def of_engine(parser: str, **options: Any) -> tuple[FakeClient, SchedulerHarness]:
    configs = make_configs(options=options)
    configs[0].structured_outputs_config.reasoning_parser = parser
    return rig(tails=True, configs=configs)


@pytest.mark.parametrize(
    ("option", "parser", "stored"),
    [
        ("auto", "", 160),
        ("auto", "qwen3", 96),
        ("on", "qwen3", 160),
        ("off", "", 96),
    ],
)
def test_answers_are_not_stored_where_no_prompt_repeats_them(
    option: str, parser: str, stored: int
) -> None:
    client, world = of_engine(parser, **{"kvass.generated": option})
    world.add("a", range(PROMPT), max_tokens=61)
    world.run(client)
    assert stored_tokens(client) == stored


def test_the_smaller_of_both_limits_counts() -> None:
    client, world = of_engine("qwen3")
    world.add("a", range(PROMPT), max_tokens=61, params={MOST_TOKENS: 130})
    world.add("b", range(500, 600), max_tokens=61, params={MOST_TOKENS: 33})
    world.run(client)
    ends: dict[str, int] = {}
    for item in (item for items in client.reserves for item in items):
        end = item.first * CHUNK + len(item.blocks) // 32 * BLOCK
        ends[item.request] = max(end, ends.get(item.request, 0))
    assert ends == {"a": 96, "b": 32}


def test_what_is_stored_is_no_part_of_the_key() -> None:
    """Engines with and without a reasoning parser share rows."""
    config, caches = make_configs()
    before = read_setup(config, caches)
    config.structured_outputs_config.reasoning_parser = "qwen3"
    now = read_setup(config, caches)
    assert (before.thinks, now.thinks) == (False, True)
    assert before.identity == now.identity


# ---------------------------------------------------------------- what the client is told


def test_the_answer_says_what_kvass_did_if_it_is_asked() -> None:
    client, world = rig(tails=True)
    told: list[Any] = []
    real = world.connector.request_finished_all_groups

    def finished(*args: Any) -> Any:
        told.append(real(*args))
        return told[-1]

    world.connector.request_finished_all_groups = finished
    for name, params in (("a", {REPORT: True}), ("b", {REPORT: True}), ("c", None)):
        world.add(name, range(PROMPT), max_tokens=1, params=params)
        world.run(client)
        world.pool.reset_prefix_cache()
    assert [held for held, _ in told] == [False] * 3
    assert [report for _, report in told] == [
        {"kvass": {"hit_tokens": 0, "kept_tokens": 0, "missed_because": "not_found"}},
        {"kvass": {"hit_tokens": 96, "kept_tokens": 0, "missed_because": ""}},
        None,
    ]


@pytest.mark.parametrize(("chunks", "tokens"), [(0, 0), (2, 64), (9, 100)])
def test_the_answer_says_how_much_is_retained(chunks: int, tokens: int) -> None:
    """No more than the request has."""
    client, world = rig(tails=True)
    world.add("a", range(PROMPT), max_tokens=1, params={TTL: "5m"})
    client.kept_chunks = chunks
    planner = world.connector._planner
    planner.match("a", 0)
    assert planner.outcome("a")[1] == tokens
    world.run(client)
    assert {context.keep_s for context in client.contexts.values()} == {300.0}
    assert {item.keep_s for items in client.reserves for item in items} == {300.0}
