"""The numbers in the documents are those of the code: each sentence below has them as it says."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Final

import msgspec
import pytest

from examples.tiny import PATIENT_MS
from kvass._version import TESTED_VLLM
from kvass.arena.room import SAFE_SHARE
from kvass.cli import run
from kvass.cli.bench import baseline, copies, lookups
from kvass.cli.doctor import beside, devices, machine
from kvass.client import daemon_connection
from kvass.client.pages import ANSWER_S
from kvass.client.scheduler import LATE_S, SchedulerClient
from kvass.config import Config
from kvass.connectors.vllm import rest
from kvass.core.clients import tenants
from kvass.core.pending.promotion import INSTANCE_SHARE
from kvass.core.rows.removed import ROOM
from kvass.core.state import CoreConfig
from kvass.core.tiers import epochs, flush, load, plan
from kvass.daemon import last_events
from kvass.daemon.tier_process.supervisor import Periods
from kvass.engine import (
    adapters,
    copier,
    held_blocks,
    planner,
    prefill_speed,
    row_events,
    setup,
    weights,
)
from kvass.simulate import report, traces
from kvass.tiers.options import DiskOptions, MooncakeOptions, ObjectStoreOptions, RedisOptions
from kvass.tiers.pacing import IO_BYTES
from kvass.tiers.redis import PIECE_BYTES
from kvass.types import (
    GUESS_TOKENS_S,
    MAX_PATIENCE_S,
    MAX_RANKS,
    MOST_QUOTAS,
    Limits,
    Timing,
)
from kvass.web import metrics, server, source

ROOT: Final = Path(__file__).parent.parent
DEFAULT: Final = {f.name: f.default for f in msgspec.structs.fields(Config)}
TIMING, LIMITS, PERIODS = Timing(), Limits(), Periods()
CALL: Final = inspect.signature(SchedulerClient).parameters
CORE: Final = CoreConfig(boot=b"", arena_bytes=1)
MIB, GIB = 1 << 20, 1 << 30
VERSIONS: Final = sorted(tuple(map(int, version.split("."))) for version in TESTED_VLLM)


def default(options: type[msgspec.Struct], name: str) -> object:
    return {f.name: f.default for f in msgspec.structs.fields(options)}[name]


Number = object
NUMBERS: Final[list[tuple[str, str, tuple[Number, ...]]]] = [
    ("README.md", "This works with vLLM 0.{} to", (VERSIONS[0][1],)),
    (
        "ARCHITECTURE.md",
        "then up to {} ms. The source blocks",
        (1e3 * CALL["reserve_wait_s"].default,),
    ),
    ("README.md", "the weights and {} GiB for vLLM's", (beside.PROCESS_BYTES / GIB,)),
    ("README.md", "vLLM wants {} % of all memory", (100 * beside.VLLM_SHARE,)),
    ("README.md", "what is left, up to {} % of it", (100 * SAFE_SHARE,)),
    ("README.md", "with windows or states one chunk, {})", (setup.MIN_CHUNK_TOKENS,)),
    ("docs/faq.md", "On a CPU vLLM wants {} % of all memory", (100 * beside.VLLM_SHARE,)),
    ("docs/vllm.md", "of the first, waits up to {} s", (run.TURN_S,)),
    ("ARCHITECTURE.md", "are held until it comes (up to {} s)", (LATE_S,)),
    ("ARCHITECTURE.md", "at most {} MiB per operation", (load.LOAD_BYTES / MIB,)),
    ("ARCHITECTURE.md", "At most {} MiB, and an eighth of L1", (flush.FLUSH_BYTES / MIB,)),
    ("ARCHITECTURE.md", "one per request, {} at most", (server.CONNECTIONS,)),
    ("ARCHITECTURE.md", "a sample of the history every {} s", (source.SAMPLE_S,)),
    ("docs/laws.md", "at most {} % of L1 reserved or", (100 * LIMITS.instance_write_share,)),
    ("docs/laws.md", "At most {} % of L1 is LOADING", (100 * plan.LOADING_SHARE,)),
    ("docs/laws.md", "there are at most {} tenants", (tenants.MOST,)),
    ("docs/laws.md", "An instance has at most {} ranks", (MAX_RANKS,)),
    ("docs/concepts.md", "the unit that is stored, {} tokens", (setup.MIN_CHUNK_TOKENS,)),
    ("docs/concepts.md", "at most `--lease-s` ({} s)", (DEFAULT["lease_s"],)),
    (
        "docs/failure-modes.md",
        "no call of the connector takes longer than {} ms",
        (1e3 * adapters.PATIENCE_S,),
    ),
    ("docs/failure-modes.md", "in all ({} ms by default)", (TIMING.lookup_budget_ms,)),
    ("docs/failure-modes.md", "tokens would take, and at most {} s.", (MAX_PATIENCE_S,)),
    ("docs/failure-modes.md", "Blocks to be stored are held for {} s at most", (LATE_S,)),
    ("docs/failure-modes.md", "it answers late, within {} s", (LATE_S,)),
    ("docs/failure-modes.md", "for `--stop-s` ({} s) at most", (DEFAULT["stop_s"],)),
    (
        "docs/failure-modes.md",
        "warns of an L1 above {} % of the machine's available",
        (100 * SAFE_SHARE,),
    ),
    ("docs/failure-modes.md", "it asks again every {} s", (daemon_connection.BACKOFF_LASTING_S,)),
    ("docs/failure-modes.md", "the last {} events", (last_events.MAX_EVENTS,)),
    ("docs/failure-modes.md", "they end {} at a time", (CORE.slice_ends,)),
    ("docs/failure-modes.md", "`--lost-engine-grace-s` ({} s)", (DEFAULT["lost_engine_grace_s"],)),
    (
        "docs/failure-modes.md",
        "gets no requests after {} s and is killed after {} s",
        (PERIODS.suspect_after * PERIODS.heartbeat_s, PERIODS.kill_after * PERIODS.heartbeat_s),
    ),
    (
        "docs/failure-modes.md",
        "starts after {}, 2, 4, ... {} s",
        (PERIODS.first_pause_s, PERIODS.longest_pause_s),
    ),
    ("docs/failure-modes.md", "a step waits {} ms at most", (1e3 * adapters.WAIT_S,)),
    ("docs/failure-modes.md", "it returns after {} s at most", (planner.CLEAR_TIMEOUT_S,)),
    ("docs/failure-modes.md", "a session without Hello ends after {} s", (TIMING.hello_s,)),
    (
        "docs/failure-modes.md",
        "one user has {} of the {} connections",
        (LIMITS.sessions_per_uid, LIMITS.sessions),
    ),
    (
        "docs/failure-modes.md",
        "would take more than {} MiB ({} MiB for one engine)",
        (LIMITS.waiting_bytes / MIB, INSTANCE_SHARE * LIMITS.waiting_bytes / MIB),
    ),
    ("docs/failure-modes.md", "{} slow HTTP clients hold all", (server.CONNECTIONS,)),
    ("docs/failure-modes.md", "has not sent its request within {} s", (server.DEADLINE_S,)),
    (
        "docs/failure-modes.md",
        "it tries again after {}, 0.02, ... {} s",
        (daemon_connection.BACKOFF_MIN_S, daemon_connection.BACKOFF_LASTING_S),
    ),
    ("docs/faq.md", "none shorter than a chunk ({} tokens)", (setup.MIN_CHUNK_TOKENS,)),
    (
        "docs/faq.md",
        "a step waits {} ms at most for all its lookups",
        (1e3 * CALL["step_wait_s"].default,),
    ),
    ("docs/vllm.md", "the smallest multiple >= {};", (setup.MIN_CHUNK_TOKENS,)),
    ("docs/vllm.md", "`--lookup-budget-ms` and at most {} s", (MAX_PATIENCE_S,)),
    ("docs/vllm.md", "measured in steps of {} tokens and more", (prefill_speed.MIN_SAMPLE_TOKENS,)),
    ("docs/vllm.md", "{} tokens per second are assumed", (GUESS_TOKENS_S,)),
    ("docs/vllm.md", "waits for the copy, {} ms at most", (1e3 * copier.COPY_WAIT_S,)),
    ("docs/vllm.md", "wait for such copies, for up to {} s.", (rest.FINISH_S,)),
    ("docs/vllm.md", "if no request is left: up to {} s.", (rest.FINISH_S,)),
    ("docs/vllm.md", "for up to {} s after its last answer", (rest.ANSWER_S,)),
    ("docs/vllm.md", "last answer and {} s in all", (rest.ANSWERS_S,)),
    ("docs/vllm.md", "copies have ended, for up to {} ms", (1e3 * rest.COPIED_S,)),
    ("docs/vllm.md", "has not ended {} s after its deadline", (held_blocks.HUNG_S,)),
    ("docs/vllm.md", "The start of an engine waits up to {} s", (weights.NAME_WAIT_S,)),
    ("docs/vllm.md", "in up to {} threads", (weights.MAX_THREADS,)),
    ("docs/vllm.md", "more than {} ranks", (MAX_RANKS,)),
    ("docs/sglang.md", "a call waits {} s at most", (ANSWER_S,)),
    (
        "docs/tiers.md",
        "how many seconds flushing may delay the daemon's end | {} |",
        (DEFAULT["stop_s"],),
    ),
    ("docs/tiers.md", "parallel reads and writes | {} |", (default(DiskOptions, "threads"),)),
    ("docs/tiers.md", "`timeout_s` ({})", (default(RedisOptions, "timeout_s"),)),
    ("docs/tiers.md", "A record up to {} MiB is one value", (PIECE_BYTES / MIB,)),
    ("docs/tiers.md", "decrypts each {} MiB when", (IO_BYTES / MIB,)),
    ("docs/tiers.md", "{} MiB for each thread that", (2 * IO_BYTES / MIB,)),
    (
        "docs/tiers.md",
        "ten times as long while bytes come | {} |",
        (default(ObjectStoreOptions, "timeout_s"),),
    ),
    (
        "docs/tiers.md",
        "requests of all calls together (1..256) | {} |",
        (default(ObjectStoreOptions, "connections"),),
    ),
    (
        "docs/tiers.md",
        "master or owner of memory (1..30) | {} |",
        (default(MooncakeOptions, "timeout_s"),),
    ),
    ("docs/tiers.md", "daemon that starts within these {} s", (epochs.LOOK_AGAIN_S,)),
    ("docs/tiers.md", "takes {} MiB more for", (IO_BYTES >> 20,)),
    ("docs/tenants.md", "Up to {} tenants can have a quota", (MOST_QUOTAS,)),
    ("docs/tenants.md", "of the first {}", (tenants.SHOWN,)),
    ("docs/monitoring.md", "a sample every {} s of the last four hours", (source.SAMPLE_S,)),
    ("docs/monitoring.md", "and the last {} events", (source.EVENTS,)),
    (
        "docs/monitoring.md",
        "A request must arrive within {} s, and its body may have {} MiB",
        (server.DEADLINE_S, server.BODY_BYTES / MIB),
    ),
    ("docs/monitoring.md", "At most {} connections are open", (server.CONNECTIONS,)),
    ("docs/monitoring.md", "`model` has at most {} values", (metrics.MODELS,)),
    (
        "docs/security.md",
        "can hold its {} connections, {} s at a time",
        (server.CONNECTIONS, server.DEADLINE_S),
    ),
    ("docs/events.md", "a list of the last {} rows that left L1", (ROOM,)),
    ("docs/events.md", "it asks the daemon every {} ms", (1e3 * row_events.IDLE_S,)),
    ("docs/events.md", "or it has been away for {} s", (row_events.AWAY_S,)),
    ("docs/operating.md", "{} in all, {} per user", (LIMITS.sessions, LIMITS.sessions_per_uid)),
    (
        "docs/operating.md",
        "It warns of one above {} % of the machine's available memory",
        (100 * SAFE_SHARE,),
    ),
    (
        "docs/compatibility.md",
        "tries again every {} s and when",
        (daemon_connection.BACKOFF_LASTING_S,),
    ),
    (
        "docs/bench.md",
        "loading a prompt of {} MiB (all engines together)",
        (copies.PROMPT_BYTES / MIB,),
    ),
    ("docs/bench.md", "A ratio may fall by {} %", (100 * baseline.TOLERANCE,)),
    ("docs/bench.md", "tokens ({} chunks), and its release", (lookups.KEYS,)),
    (
        "docs/doctor.md",
        "It waits for torch {} s at most, for a daemon {} s",
        (devices.TORCH_S, machine.DAEMON_S),
    ),
    (
        "docs/doctor.md",
        "a warning above {} % of the machine's available memory",
        (100 * SAFE_SHARE,),
    ),
    (
        "docs/doctor.md",
        "and {} GiB; or without that variable {} % of all memory",
        (beside.PROCESS_BYTES / GIB, 100 * beside.VLLM_SHARE),
    ),
    ("docs/sizing.md", "one for each {} tokens of the prompt", (traces.MOONCAKE_TOKENS,)),
    ("docs/sizing.md", "more than {} of them are an error", (traces.MOST_WRONG,)),
    ("docs/sizing.md", "that has {} % of the hits", (100 * report.KNEE,)),
    ("docs/recipes.md", "the example sets {} ms", (PATIENT_MS,)),
    ("docs/embedding.md", "(`step_wait_s`, {} ms", (1e3 * CALL["step_wait_s"].default,)),
]
"""A document, a sentence in it that occurs once, and the numbers that stand at its ``{}``."""


def wrong(document: str, sentence: str, numbers: tuple[Number, ...]) -> str:
    """How the document differs; empty if the sentence occurs once, with these numbers."""
    text = " ".join((ROOT / document).read_text().split())
    pattern = re.escape(sentence).replace(r"\{\}", r"(\d[\d,]*(?:\.\d+)?)")
    found = [m.groups() for m in re.finditer(pattern, text)]
    wanted = [tuple(map(shown, numbers))]
    return "" if found == wanted else f"{document}: {sentence!r} has {found}, the code {wanted}"


def shown(number: Number) -> str:
    """A number as the documents write it: 1,024 and 0.5."""
    assert isinstance(number, int | float), number
    rounded = round(number, 6)
    return f"{int(rounded):,}" if rounded == int(rounded) else f"{rounded:g}"


@pytest.mark.parametrize(("document", "sentence", "numbers"), NUMBERS)
def test_a_number_is_that_of_the_code(
    document: str, sentence: str, numbers: tuple[Number, ...]
) -> None:
    assert wrong(document, sentence, numbers) == ""


def test_negative_control_another_number_and_a_sentence_that_is_gone_are_seen() -> None:
    for document, sentence, numbers in NUMBERS:
        assert sentence.count("{}") == len(numbers)
        others = [n + 1 for n in numbers if isinstance(n, int | float)]
        for at, other in enumerate(others):
            changed = (*numbers[:at], other, *numbers[at + 1 :])
            assert wrong(document, sentence, changed), sentence
        assert "has []" in wrong(document, f"never {sentence}", numbers)
