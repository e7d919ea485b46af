"""The workloads: the command of each, and the figures in the result that it writes.

Sizes fit two cores. A round has its own seed, so it finds nothing of the round before, except in
``long-doc-qa``, whose documents are always the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from kvass.errors import Unavailable

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
LMCACHE: Final = {
    "input_throughput": "tok/s",
    "mean_ttft_ms": "ms",
    "p50_ttft_ms": "ms",
    "p99_ttft_ms": "ms",
    "mean_request_latency_ms": "ms",
    "mean_decode_speed": "tok/s",
}
"""The same of ``lmcache bench engine``."""
TURNS: Final = 4
CHATS: Final = 3
CHUNK: Final = 128
APART_S: Final = 1.25


class Place(msgspec.Struct, frozen=True):
    """What a command is given: an interpreter, a server, a model's folder, an empty folder."""

    python: str
    url: str
    model: Path
    folder: Path
    number: int
    """Of the round: the seed."""


class Workload(msgspec.Struct, frozen=True):
    """``read``: the figures in a result; it raises ``Unavailable`` if a request failed."""

    name: str
    metrics: dict[str, str]
    command: Callable[[Place], list[str]]
    result: str
    read: Callable[[dict[str, Any]], dict[str, float]]

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


def _vllm(name: str, *own: object) -> Workload:
    def command(place: Place) -> list[str]:
        options: list[object] = ["--base-url", place.url, "--model", place.model]
        options += ["--dataset-name", name, *own, "--ignore-eos", "--seed", place.number]
        options += ["--disable-tqdm", "--save-result", "--result-dir", place.folder]
        options += ["--result-filename", "result.json"]
        if name == "timed_trace":
            options += ["--dataset-path", trace(place.folder)]
        return [place.python, "-m", "bench.judge.client", *map(str, options)]

    return Workload(name, VLLM, command, "result.json", _of_vllm)


def _of_vllm(result: dict[str, Any]) -> dict[str, float]:
    if result["completed"] != result["num_prompts"]:
        raise Unavailable(f"{result['completed']} of {result['num_prompts']} requests completed")
    return result


def _long_doc_qa(place: Place) -> list[str]:
    """Five documents: 5 GB of KV cache, if a GB has as many tokens as a document."""
    options: list[object] = ["--engine-url", place.url, "--model", place.model]
    options += ["--workload", "long-doc-qa", "--ldqa-document-length", 800]
    options += ["--kv-cache-volume", 5, "--tokens-per-gb-kvcache", 800]
    options += ["--ldqa-query-per-document", 2, "--ldqa-num-inflight-requests", 1]
    options += ["--ldqa-max-output-length", 16, "--ignore-eos", "--seed", place.number]
    options += ["--output-dir", place.folder, "--json", "--no-csv", "--quiet", "--no-interactive"]
    return [place.python, "-m", "lmcache.cli.main", "bench", "engine", *map(str, options)]


def _of_lmcache(result: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = result["results"]
    if found["failed_requests"] or not found["successful_requests"]:
        raise Unavailable(f"{found['failed_requests']:.0f} requests failed")
    return found


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
    Workload("long-doc-qa", LMCACHE, _long_doc_qa, "bench_summary.json", _of_lmcache),
)
