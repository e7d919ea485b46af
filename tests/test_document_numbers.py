"""The numbers that a user plans with are those of the code: each sentence below has them so."""

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
from kvass.cli.doctor import beside
from kvass.client import reconnecting
from kvass.client.pages import ANSWER_S
from kvass.client.scheduler import LATE_S, SchedulerClient
from kvass.config import Config
from kvass.core.clients import tenants
from kvass.core.tiers import plan
from kvass.daemon.tier_process.supervisor import Periods
from kvass.engine import adapters, planner, setup
from kvass.layout import windows
from kvass.tiers.options import DiskOptions, MooncakeOptions, ObjectStoreOptions, RedisOptions
from kvass.transfer import staging
from kvass.types import MAX_PATIENCE_S, MAX_RANKS, MOST_QUOTAS, Limits, Timing
from kvass.web import metrics, server

ROOT: Final = Path(__file__).parent.parent
DEFAULT: Final = {f.name: f.default for f in msgspec.structs.fields(Config)}
TIMING, LIMITS, PERIODS = Timing(), Limits(), Periods()
CALL: Final = inspect.signature(SchedulerClient).parameters
GIB: Final = 1 << 30
VERSIONS: Final = sorted(tuple(map(int, version.split("."))) for version in TESTED_VLLM)


def default(options: type[msgspec.Struct], name: str) -> object:
    return {f.name: f.default for f in msgspec.structs.fields(options)}[name]


Number = object
NUMBERS: Final[list[tuple[str, str, tuple[Number, ...]]]] = [
    ("README.md", "for vLLM [0.{} to 0.{}]", (VERSIONS[0][1], VERSIONS[-1][1])),
    ("docs/sizing.md", "the weights and {} GiB for vLLM's", (beside.PROCESS_BYTES / GIB,)),
    ("docs/sizing.md", "vLLM wants {} % of all memory", (100 * beside.VLLM_SHARE,)),
    ("docs/sizing.md", "beside an L1 above {} % of it", (100 - 100 * beside.VLLM_SHARE,)),
    ("docs/sizing.md", "may have up to {} % of what", (100 * SAFE_SHARE,)),
    ("docs/faq.md", "none shorter than a chunk ({} tokens)", (setup.MIN_CHUNK_TOKENS,)),
    ("docs/gpu.md", "pages are shorter than {} KiB can", (staging.LONGEST >> 10,)),
    ("docs/gpu.md", "copy up to {} MiB in one", (staging.STAGE_BYTES >> 20,)),
    ("docs/gpu.md", "takes {} MiB of the GPU's", (staging.STAGES * staging.STAGE_BYTES >> 20,)),
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
    ("docs/failure-modes.md", "for `--stop-s` ({} s) at most", (DEFAULT["stop_s"],)),
    ("docs/failure-modes.md", "it asks again every {} s", (reconnecting.BACKOFF_LASTING_S,)),
    ("docs/failure-modes.md", "`--lost-engine-grace-s` ({} s)", (DEFAULT["lost_engine_grace_s"],)),
    (
        "docs/failure-modes.md",
        "gets no requests after {} s and is killed after {} s",
        (PERIODS.suspect_after * PERIODS.heartbeat_s, PERIODS.kill_after * PERIODS.heartbeat_s),
    ),
    ("docs/failure-modes.md", "it returns after {} s at most", (planner.CLEAR_TIMEOUT_S,)),
    ("docs/failure-modes.md", "a session without Hello ends after {} s", (TIMING.hello_s,)),
    (
        "docs/failure-modes.md",
        "one user has {} of the {} connections",
        (LIMITS.sessions_per_uid, LIMITS.sessions),
    ),
    (
        "docs/faq.md",
        "a step waits {} ms at most for all its lookups",
        (1e3 * CALL["step_wait_s"].default,),
    ),
    ("docs/vllm.md", "more than {} ranks", (MAX_RANKS,)),
    ("docs/vllm.md", "else {}, or four times the window", (windows.INTERVAL,)),
    ("docs/sglang.md", "a call waits {} s at most", (ANSWER_S,)),
    (
        "docs/tiers.md",
        "how many seconds flushing may delay the daemon's end | {} |",
        (DEFAULT["stop_s"],),
    ),
    ("docs/tiers.md", "parallel reads and writes | {} |", (default(DiskOptions, "threads"),)),
    ("docs/tiers.md", "`timeout_s` ({})", (default(RedisOptions, "timeout_s"),)),
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
    ("docs/tenants.md", "Up to {} tenants can have a quota", (MOST_QUOTAS,)),
    ("docs/monitoring.md", "At most {} connections are open", (server.CONNECTIONS,)),
    ("docs/monitoring.md", "`model` has at most {} values", (metrics.MODELS,)),
    ("docs/operating.md", "{} in all, {} per user", (LIMITS.sessions, LIMITS.sessions_per_uid)),
    ("docs/recipes.md", "the example sets {} ms", (PATIENT_MS,)),
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
