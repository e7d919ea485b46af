"""The workloads: the command of each, its model, and the figures in the result that it writes.

Sizes fit two cores. A round has its own seed, so it finds nothing of the round before. Most texts
of ``lmcache bench engine`` have none; there the model's chat template puts a number before them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.judge.aiperf import MISSING
from bench.judge.model import PRETRAINED, RANDOM
from examples.demo_questions import ROOT, SYSTEM, TEXTS
from kvass.errors import Unavailable
from tests.support.real_model import chat

VLLM: Final = {
    "request_throughput": "req/s",
    "total_token_throughput": "tok/s",
    "mean_ttft_ms": "ms",
    "median_ttft_ms": "ms",
    "p99_ttft_ms": "ms",
    "mean_tpot_ms": "ms",
    "median_tpot_ms": "ms",
}
"""What ``vllm bench serve`` calls its figures, and their units."""
DRAFTED: Final = VLLM | {
    "total_output_tokens": "tok",
    "spec_decode_acceptance_length": "tok",
    "spec_decode_num_drafts": "",
}
"""The same where answers end by themselves, and servers draft. An acceptance length is a token more
than a draft has accepted tokens."""
LMCACHE: Final = {
    "input_throughput": "tok/s",
    "mean_ttft_ms": "ms",
    "p50_ttft_ms": "ms",
    "p99_ttft_ms": "ms",
    "mean_request_latency_ms": "ms",
    "mean_decode_speed": "tok/s",
}
"""The same of ``lmcache bench engine``."""
PREFILL: Final = {name: unit for name, unit in LMCACHE.items() if name != "mean_decode_speed"}
"""Of a workload whose answers have one token."""
AIPERF: Final = {"request_throughput avg": "req/s"} | {
    f"{name} {which}": "ms"
    for name in ("time_to_first_token", "inter_token_latency", "request_latency")
    for which in ("avg", "p50", "p99")
}
"""The same of ``aiperf profile``: a metric, and which of its figures."""
TURNS: Final = 4
CHATS: Final = 3
CHUNK: Final = 128
APART_S: Final = 1.25
AGENTS: Final = 5
STEPS: Final = 4
PASSAGES: Final = 5
PASSAGE: Final = 3000
"""Characters, 600 to 900 tokens. All of them do not fit into vLLM's own cache. The dataset
``sharegpt`` leaves out prompts of more than 1,024 tokens."""
ASKED: Final = ("What is this text about?", "Which sentence is the most important?")


class Place(msgspec.Struct, frozen=True):
    """What a command is given: an interpreter, a server, a model's folder, an empty folder."""

    python: str
    url: str
    model: Path
    folder: Path
    number: int
    """Of the round: the seed."""
    aiperf: str | None
    """AIPerf's interpreter, if it is installed."""


class Workload(msgspec.Struct, frozen=True):
    """``read``: the figures in a result; it raises ``Unavailable`` if a request failed."""

    name: str
    metrics: dict[str, str]
    command: Callable[[Place], list[str]]
    result: str
    read: Callable[[dict[str, Any]], dict[str, float]]
    offline: bool = True
    """``HF_HUB_OFFLINE``. With it AIPerf 0.13 takes a folder for a name, and fails."""
    model: str = RANDOM
    """Of its servers."""

    def figures(self, folder: Path) -> dict[str, float]:
        """Of the result in ``folder``. Raises ``Unavailable``."""
        try:
            result = json.loads((folder / self.result).read_text())
        except FileNotFoundError:
            raise Unavailable(f"{self.name} wrote no result") from None
        found = self.read(result)
        return {name: float(found[name]) for name in self.metrics}


def trace(folder: Path) -> Path:
    """A trace with times, as of Mooncake: chats in turn, each turn with all that came before."""
    path = folder / "trace.jsonl"
    with path.open("w") as file:
        for number in range(CHATS * TURNS):
            turn, chat = divmod(number, CHATS)
            chunks = 4 + 2 * turn
            entry = {
                "timestamp": int(1000 * APART_S * number),
                "input_length": chunks * CHUNK,
                "output_length": 16,
                "hash_ids": [100 * chat + chunk for chunk in range(chunks)],
            }
            file.write(json.dumps(entry) + "\n")
    return path


def chats(place: Place) -> Path:
    """Questions about passages of real texts, about another passage each time."""
    text = "\n".join((ROOT / name).read_text() for name in TEXTS)
    passages = [text[at : at + PASSAGE] for at in range(0, PASSAGES * PASSAGE, PASSAGE)]
    prompts = [
        chat(f"{place.number}. {SYSTEM}", f"{passage}\n\n{asked}")
        for asked in ASKED
        for passage in passages
    ]
    path = place.folder / "chats.json"
    answer = {"value": ""}  # its length would be that of the answer
    path.write_text(json.dumps([{"conversations": [{"value": one}, answer]} for one in prompts]))
    return path


def _chats(place: Place) -> list[str]:
    options: list[object] = ["--dataset-path", chats(place), "--disable-shuffle"]
    options += ["--num-prompts", PASSAGES * len(ASKED), "--sharegpt-output-len", 64]
    options += ["--temperature", 0, "--max-concurrency", 1]
    return _serve(place, "sharegpt", *options)


def _vllm(name: str, *own: object) -> Workload:
    def command(place: Place) -> list[str]:
        options = [*own, "--ignore-eos"]
        if name == "timed_trace":
            options += ["--dataset-path", trace(place.folder)]
        return _serve(place, name, *options)

    return Workload(name, VLLM, command, "result.json", _of_vllm)


def _serve(place: Place, dataset: str, *own: object) -> list[str]:
    options: list[object] = ["--base-url", place.url, "--model", place.model]
    options += ["--dataset-name", dataset, *own, "--seed", place.number]
    options += ["--disable-tqdm", "--save-result", "--result-dir", place.folder]
    options += ["--result-filename", "result.json"]
    return [place.python, "-m", "bench.judge.client", *map(str, options)]


def _of_vllm(result: dict[str, Any]) -> dict[str, float]:
    if result["completed"] != result["num_prompts"]:
        raise Unavailable(f"{result['completed']} of {result['num_prompts']} requests completed")
    return result


def _lmcache(name: str, *own: object, metrics: dict[str, str] = LMCACHE) -> Workload:
    """A GB has 800 tokens. ``--rag-template-kwargs`` is for all workloads, whatever its name is."""

    def command(place: Place) -> list[str]:
        options: list[object] = ["--engine-url", place.url, "--model", place.model]
        options += ["--workload", name, "--tokens-per-gb-kvcache", 800, *own, "--ignore-eos"]
        options += ["--seed", place.number, "--rag-template-kwargs", f"salt={place.number}"]
        options += ["--output-dir", place.folder, "--json", "--no-csv", "--quiet"]
        options += ["--no-interactive"]
        return [place.python, "-m", "lmcache.cli.main", "bench", "engine", *map(str, options)]

    return Workload(name, metrics, command, "bench_summary.json", _of_lmcache)


def _of_lmcache(result: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = result["results"]
    if found["failed_requests"] or not found["successful_requests"]:
        raise Unavailable(f"{found['failed_requests']:.0f} requests failed")
    return found


def _agents(place: Place) -> list[str]:
    """Sessions with one system prompt; each step has all that came before, and waits 1 s."""
    if place.aiperf is None:
        raise Unavailable(f"AIPerf {MISSING}")
    options: list[object] = ["--url", place.url, "--model", place.model]
    options += ["--tokenizer", place.model, "--endpoint-type", "chat", "--streaming"]
    options += ["--conversation-num", AGENTS, "--num-dataset-entries", AGENTS]
    options += ["--concurrency", AGENTS, "--conversation-turn-mean", STEPS]
    options += ["--conversation-turn-delay-mean", 1000, "--shared-system-prompt-length", 320]
    options += ["--user-context-prompt-length", 320, "--isl", 96, "--osl", 16]
    options += ["--extra-inputs", "ignore_eos:true", "--use-server-token-count"]
    options += ["--random-seed", place.number]
    options += ["--workers-max", 1, "--record-processors", 1, "--ui", "none"]
    options += ["--no-gpu-telemetry", "--no-server-metrics", "--artifact-dir", place.folder]
    return [place.aiperf, "-m", "aiperf", "profile", *map(str, options)]


def _of_aiperf(result: dict[str, Any]) -> dict[str, float]:
    count = result.get("request_count", {}).get("avg", 0)
    if count != AGENTS * STEPS:
        raise Unavailable(f"{count:.0f} of {AGENTS * STEPS} requests completed")
    parts = (name.split(" ") for name in AIPERF)
    return {f"{name} {which}": result[name][which] for name, which in parts}


WORKLOADS: Final[Sequence[Workload]] = (
    _vllm(
        "prefix_repetition",
        *("--num-prompts", 18, "--prefix-repetition-num-prefixes", 6),
        *("--prefix-repetition-prefix-len", 768, "--prefix-repetition-suffix-len", 64),
        *("--prefix-repetition-output-len", 16, "--max-concurrency", 1),
    ),
    _vllm(
        "random",
        *("--num-prompts", 12, "--random-prefix-len", 512, "--random-input-len", 192),
        *("--random-output-len", 16, "--max-concurrency", 2),
    ),
    _vllm(
        "timed_trace",
        *("--num-prompts", CHATS * TURNS, "--timed-trace-chunk-hash-size", CHUNK),
        *("--timed-trace-sec-multiplier", 0.001),
    ),
    _lmcache(  # five documents
        "long-doc-qa",
        *("--kv-cache-volume", 5, "--ldqa-document-length", 800),
        *("--ldqa-query-per-document", 2, "--ldqa-num-inflight-requests", 1),
        *("--ldqa-max-output-length", 16),
    ),
    _lmcache(  # five sessions
        "multi-round-chat",
        *("--kv-cache-volume", 5, "--mrc-shared-prompt-length", 100),
        *("--mrc-chat-history-length", 600, "--mrc-user-input-length", 40),
        *("--mrc-output-length", 16, "--mrc-qps", 0.4, "--mrc-duration", 25),
    ),
    _lmcache(
        "random-prefill",
        *("--rp-request-length", 1000, "--rp-num-requests", 8),
        metrics=PREFILL,
    ),
    _lmcache(
        "long-doc-permutator",
        *("--ldp-num-contexts", 5, "--ldp-context-length", 240),
        *("--ldp-system-prompt-length", 240, "--ldp-num-permutations", 8),
        *("--ldp-num-inflight-requests", 1, "--ldp-max-output-length", 16),
    ),
    Workload("agents", AIPERF, _agents, "profile_export_aiperf.json", _of_aiperf, offline=False),
    Workload("chats", DRAFTED, _chats, "result.json", _of_vllm, model=PRETRAINED),
)
