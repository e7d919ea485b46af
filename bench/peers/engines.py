"""Whole vLLM engines on this machine's CPU: without a cache, with kvass, with the others.

All modes share an interpreter, a model (``bench.engine``), the malloc settings and one thread. One
request at a time goes to one mode, in turns; another one begins each round. Servers live through
the run; engines are new in each repetition.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.engine import ARGS, ENVIRONMENT, MODELS, SHAPE, switched_engine, words
from bench.peers.engineless import Plan
from bench.peers.results import Results, Row, attempt, in_turns
from bench.peers.servers import LMCacheServer, Server
from kvass.cli.bench.rig import say
from kvass.errors import Unavailable
from tests.support.vllm.models import build
from tests.support.vllm.process import OFF, Answer, EngineProcess, Prompt

MODES: Final = ("none", "again", "lmcache", "kvass", "offloading")
"""``again``: a second engine without any cache. What it differs from the first is noise."""
SERVED: Final = ("lmcache", "kvass")
CACHED: Final = (*SERVED, "offloading")
L1_BYTES: Final = 2 << 30
SYNC_BYTES: Final = 16 << 20
"""Up to so many bytes vLLM's offloading loads inside a step, from vLLM 0.33 on."""
NEW_TOKENS: Final = 1511
CROWD: Final = 4
CROWD_TOKENS: Final = 411
OUTPUT: Final = 24
SWITCHED: Final = ((1, NEW_TOKENS, 1), (CROWD, CROWD_TOKENS, OUTPUT), (1, 64, OUTPUT))
"""Prompts at once, tokens of each, and of each answer."""
_SLOW_S: Final = 300.0
_BACK_S: Final = 60.0
_DOWN_S: Final = 120.0


class Sizes(msgspec.Struct, frozen=True):
    """Tokens of the workloads: off block and chunk boundaries."""

    document: int = 6011
    system: int = 2011
    question: int = 700
    turn: tuple[int, ...] = (500, 850, 1200, 1550, 1900)
    agent: int = 811
    tool: int = 123
    steps: int = 5


SHORT: Final = Sizes(
    document=1511, system=811, question=150, turn=(300, 480, 660), agent=411, steps=3
)


class Engines:
    """The engines of one repetition, those that started."""

    def __init__(self, found: dict[str, EngineProcess], repetition: int) -> None:
        self.found, self.repetition = found, repetition

    def ask(
        self,
        mode: str,
        prompt: list[int],
        tokens: int = 1,
        *,
        empty: bool = True,
        within_s: float = _SLOW_S,
    ) -> Answer:
        """One request; ``empty``: vLLM's own cache first."""
        engine = self.found[mode]
        if empty and not engine.reset():
            raise Unavailable("vLLM's own cache could not be emptied")
        (answer,) = engine.generate(Prompt(prompt, tokens), timeout_s=within_s)
        return answer


def connector(mode: str, server: Server | None, memory: int = L1_BYTES) -> dict[str, Any] | None:
    """vLLM's ``kv_transfer_config``. ``memory``: the bytes of vLLM's offloading."""
    both = {"kv_role": "kv_both"}
    if mode == "offloading":
        options: dict[str, Any] = {
            "cpu_bytes_to_use": memory,
            "block_size": ARGS["block_size"],
            "sync_load_budget_bytes": SYNC_BYTES,
            "spec_name": "HostOffloadingSpec",
            "spec_module_path": "bench.peers.offloading_spec",
        }
        return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": options, **both}
    if server is None:
        return None
    if isinstance(server, LMCacheServer):
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": server.port,
                "lmcache.mp.mp_transfer_mode": "engine_driven",
            },
            **both,
        }
    return {
        "kv_connector": "KvassConnector",
        "kv_connector_module_path": "kvass.connectors.vllm",
        # as LMCache, which does not ask whether weights changed when vLLM's cache is reset
        "kv_connector_extra_config": {
            "kvass.socket": server.address,
            "kvass.fixed_weights": True,
        },
        **both,
    }


def measure_engines(
    results: Results, plan: Plan, repetitions: int, sizes: Sizes, parts: Collection[str]
) -> None:
    """The rows of whole engines, of those ``parts`` (``ENGINE_PARTS``) that are named."""
    hits = {name: hit_rows(results, name, sizes) for name in WORKLOADS if name in parts}
    new, down = [], []
    if "new" in parts:
        new = new_rows(results)
    if "down" in parts:
        down = [
            results.row("down", "down_next", "server killed: first token of a new prompt", "s"),
            results.row("down", "down_back", "server started again: hits again after", "s"),
        ]
    rows = [*(row for two in hits.values() for row in two), *new, *down]
    model = build(MODELS, SHAPE)
    with ExitStack() as ending:
        servers = start_servers(plan, rows, ending)
        for number in range(repetitions):
            with start_engines(plan, model, servers, number, rows) as engines:
                of = f"engines {number + 1} of {repetitions}"
                for name, two in hits.items():
                    say(f"{name}, {of}")
                    WORKLOADS[name][1](engines, sizes, plan.rounds, *two)
                if new:
                    say(f"new prompts, {of}")
                    measure_new(engines, plan.rounds, *new[: -len(SWITCHED)])
                if down and number == repetitions - 1:
                    say("engines whose cache server is killed")
                    measure_down(engines, servers, *down)
            if new and "kvass" in servers:
                say(f"kvass on and off, {number + 1} of {repetitions}")
                own = new[-len(SWITCHED) :]
                where = model, plan.folder / "engine-switched.log", servers["kvass"].address
                with (
                    attempt("kvass", *own),
                    switched_engine(*where, python=plan.python) as engine,
                ):
                    engine.one(words(1500, "warm-up"), 2)
                    for shape, row in zip(SWITCHED, own, strict=True):
                        measure_switched(engine, 4 * plan.rounds, shape, row)


def hit_rows(results: Results, name: str, sizes: Sizes) -> list[Row]:
    """Of a workload: what a user waits, and what was found."""
    what = WORKLOADS[name][0].format(s=sizes, turns=len(sizes.turn))
    seen = what.partition(":")[0]
    return [
        results.row("engine", name, what, "s"),
        results.row("engine", f"{name}_found", f"{seen}: prompt tokens found", "", more=True),
    ]


def new_rows(results: Results) -> list[Row]:
    """Prompts without a hit: what a user waits, and how much of it is in the connector's hooks."""
    alone = f"first token of {NEW_TOKENS:,} new tokens"
    crowd = f"{CROWD} new prompts of {CROWD_TOKENS} + {OUTPUT} tokens at once"
    rows = [
        results.row("new", f"new_{name}{which}", what + text, "%")
        for name, what in (("first", alone), ("crowd", crowd))
        for which, text in (("", ", against none"), ("_hooks", ": in the connector's hooks"))
    ]
    for name, (prompts, tokens, output) in zip(("first", "crowd", "short"), SWITCHED, strict=True):
        shape = f"{prompts} x {tokens:,} new tokens and {output} of an answer"
        what = f"{shape}: kvass on, against off, in one engine"
        rows.append(results.row("new", f"new_{name}_switched", what, "%"))
    return rows


def start_servers(
    plan: Plan, rows: Sequence[Row], ending: ExitStack, memory: int = L1_BYTES
) -> dict[str, Server]:
    """The caches' servers, until ``ending``; ``memory``: the bytes of each. What does not start has
    its reason in every row."""
    servers: dict[str, Server] = {}
    for system in SERVED:
        with attempt(system, *rows):
            server = plan.server(system, memory)
            ending.callback(server.close)
            server.start()
            servers[system] = server
    return servers


@contextmanager
def start_engines(
    plan: Plan,
    model: Path,
    servers: dict[str, Server],
    number: int,
    rows: Sequence[Row],
    *,
    modes: Sequence[str] = MODES,
    memory: int = L1_BYTES,
    args: Mapping[str, Any] = ARGS,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Engines]:
    """New engines. What does not start has its reason in every row, and is not tried again.
    ``environment``: more variables."""
    say("the start of the engines")
    with ExitStack() as ending:
        found: dict[str, EngineProcess] = {}
        for mode in modes:
            mine = [row for row in rows if row.part != "down" or mode in SERVED]
            if all(mode in row.trouble for row in mine):
                continue
            with attempt(mode, *mine):
                engine = EngineProcess(
                    model,
                    plan.folder / f"engine-{rows[0].part}-{mode}-{number}.log",
                    transfer=connector(mode, servers.get(mode), memory),
                    python=plan.python,
                    args=args,
                    environment={**(ENVIRONMENT or {}), **(environment or {})} or None,
                    start_timeout_s=_SLOW_S,
                )
                ending.callback(engine.close)
                tokens = [4 + token % 1000 for token in words(1500, ("warm-up", number))]
                engine.wait_ready().generate(Prompt(tokens, 2), timeout_s=_SLOW_S)
                found[mode] = engine
        yield Engines(found, number)


# ---------------------------------------------------------------- prompts with hits


def measure_document(engines: Engines, sizes: Sizes, rounds: int, *rows: Row) -> None:
    """A long prompt again."""
    prompt = words(sizes.document, ("document", engines.repetition))
    _repeat(engines, rounds, rows, prompt, lambda _: prompt)


def measure_rag(engines: Engines, sizes: Sizes, rounds: int, *rows: Row) -> None:
    """A system prompt that was seen, and a question that was not."""
    system = words(sizes.system, ("system", engines.repetition))

    def asked(name: object) -> list[int]:
        return system + words(sizes.question, ("question", engines.repetition, name))

    _repeat(engines, rounds, rows, asked("first"), asked)


def _repeat(
    engines: Engines,
    rounds: int,
    rows: Sequence[Row],
    first: list[int],
    asked: Callable[[object], list[int]],
) -> None:
    """``first`` is computed once; then prompts again."""

    def one(mode: str, name: object, empty: bool) -> tuple[float, int]:
        answer = engines.ask(mode, asked(name), empty=empty)
        return answer.first_token_s, answer.cached

    for mode in engines.found:
        if mode in CACHED:
            with attempt(mode, *rows):
                engines.ask(mode, first)
    _take_turns(engines, rounds, rows, one)


def measure_chat(engines: Engines, sizes: Sizes, rounds: int, *rows: Row) -> None:
    """A chat's turns, each with all that was said before."""

    def one(mode: str, name: object, empty: bool) -> tuple[float, int]:
        whole = words(sizes.turn[-1], ("chat", engines.repetition, name))
        answers = [engines.ask(mode, whole[:end], empty=empty) for end in sizes.turn]
        return sum(a.first_token_s for a in answers), sum(a.cached for a in answers)

    _take_turns(engines, max(1, rounds // 3), rows, one)


def measure_agent(engines: Engines, sizes: Sizes, rounds: int, *rows: Row) -> None:
    """An agent's steps: each prompt has what was generated before, and a tool's answer."""

    def one(mode: str, name: object, empty: bool) -> tuple[float, int]:
        prompt, total_s, cached = words(sizes.agent, ("agent", engines.repetition, name)), 0.0, 0
        for step in range(sizes.steps):
            answer = engines.ask(mode, prompt, OUTPUT, empty=empty)
            total_s, cached = total_s + answer.total_s, cached + answer.cached
            prompt = prompt + answer.tokens + words(sizes.tool, ("tool", step))
        return total_s, cached

    _take_turns(engines, max(1, rounds // 3), rows, one)


def _take_turns(
    engines: Engines,
    rounds: int,
    rows: Sequence[Row],
    one: Callable[[str, object, bool], tuple[float, int]],
) -> None:
    """Seconds and tokens found of each mode, vLLM's own cache emptied before each request. What
    computes everything takes part in three rounds. ``local``: the first of these engines with its
    own cache, which has its turn like the others: right after the same engine it would be faster.
    """
    wait, found = rows
    systems = (*engines.found, *(["local"] if "none" in engines.found else []))
    for number, mode in in_turns(systems, rounds, wait, found):
        if mode in ("none", "again") and number >= 3:
            continue
        with attempt(mode, wait, found):
            engine = "none" if mode == "local" else mode
            took_s, tokens = one(engine, (number, mode), mode != "local")
            wait.add(mode, took_s)
            found.add(mode, tokens)
            if mode in CACHED and not tokens:
                raise Unavailable("nothing was found")


# ---------------------------------------------------------------- prompts without a hit


def measure_new(engines: Engines, rounds: int, *rows: Row) -> None:
    """What a cache costs prompts that nobody has seen, in percent of the engine without one: one
    prompt's first token, and some prompts at once until the last token. And the part of that time
    in which the engine's thread is in the connector's hooks: it hardly depends on noise."""

    def alone(mode: str, name: object) -> tuple[float, float]:
        answer = engines.ask(mode, words(NEW_TOKENS, name), empty=False)
        return answer.first_token_s, answer.hooks_s

    def together(mode: str, name: object) -> tuple[float, float]:
        prompts = [Prompt(words(CROWD_TOKENS, (name, i)), OUTPUT) for i in range(CROWD)]
        answers = engines.found[mode].generate(*prompts, timeout_s=_SLOW_S)
        last = max(answers, key=lambda answer: answer.total_s)
        return last.total_s, last.hooks_s

    for row, hooks, measure, times in (
        (rows[0], rows[1], alone, 2 * rounds),
        (rows[2], rows[3], together, rounds),
    ):
        turns = in_turns(tuple(engines.found), times, row)
        for number, group in groupby(turns, key=itemgetter(0)):
            took: dict[str, float] = {}
            for _, mode in group:
                with attempt(mode, row, hooks):
                    took_s, hooks_s = measure(mode, (row.name, engines.repetition, number, mode))
                    took[mode] = took_s
                    if mode in CACHED:
                        hooks.add(mode, hooks_s / took_s * 100)
            for mode in took.keys() - {"none"} if "none" in took else ():
                row.add(mode, (took[mode] / took["none"] - 1) * 100)


def measure_switched(
    engine: EngineProcess, rounds: int, shape: tuple[int, int, int], row: Row
) -> None:
    """New prompts with kvass and some without, in one engine (``SwitchedConnector``): another
    process would differ by more than kvass costs. ``shape``: one of ``SWITCHED``. What counts is
    the last token of all."""
    count, tokens, output = shape
    for number in range(rounds):
        took_s, hooks_s = dict[bool, float](), dict[bool, float]()
        for off in (False, True) if number % 2 else (True, False):
            params = {OFF: "1"} if off else None
            names = [("switched", shape, number, off, i) for i in range(count)]
            prompts = [Prompt(words(tokens, name), output, params=params) for name in names]
            last = max(engine.generate(*prompts), key=lambda answer: answer.total_s)
            took_s[off], hooks_s[off] = last.total_s, last.hooks_s
        if hooks_s[True] > hooks_s[False] / 2:
            raise Unavailable("kvass was not off")
        row.add("kvass", (took_s[False] / took_s[True] - 1) * 100)


# ---------------------------------------------------------------- without the cache's server


def measure_down(engines: Engines, servers: dict[str, Server], next_: Row, back: Row) -> None:
    """A new prompt right after the cache's server was killed; and how long after the server's new
    start a prompt that is asked over and over hits again."""
    for mode in [one for one in engines.found if one in ("none", *SERVED)]:
        with attempt(mode, next_, back):
            engines.ask(mode, words(NEW_TOKENS, ("before", mode)), empty=False)
            if mode in servers:
                servers[mode].kill()
            prompt = words(NEW_TOKENS, ("killed", mode))
            killed = engines.ask(mode, prompt, empty=False, within_s=_DOWN_S)
            next_.add(mode, killed.first_token_s)
            if mode not in servers:
                continue
            servers[mode].start()
            began_s, prompt = time.monotonic(), words(CROWD_TOKENS, ("back", mode))
            while not engines.ask(mode, prompt).cached:
                if time.monotonic() - began_s > _BACK_S:
                    raise Unavailable(f"no hit within {_BACK_S:.0f} s")
            back.add(mode, time.monotonic() - began_s)


WORKLOADS: Final[dict[str, tuple[str, Callable[..., None]]]] = {
    "document": ("{s.document:,} tokens again: first token", measure_document),
    "rag": ("{s.question} new tokens after {s.system:,} seen: first token", measure_rag),
    "chat": ("a chat of {turns} turns: first tokens, summed", measure_chat),
    "agent": ("an agent's {s.steps} steps: last tokens, summed", measure_agent),
}
ENGINE_PARTS: Final = (*WORKLOADS, "new", "down")
