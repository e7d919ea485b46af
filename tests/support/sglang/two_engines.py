"""Two real SGLang engines of one process, one after the other, on one daemon.

``python -m tests.support.sglang.two_engines SOCKET MODEL WEIGHTS...``: for each folder WEIGHTS an
``Engine`` of MODEL begins, gets these weights in place, answers the same prompt of ``TOKENS``
tokens, waits until its pages are stored and ends. Writes a line of JSON for each: how many tokens
were cached, how many rows the daemon has then, and the log probabilities of the answer.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any, Final

from kvass.client.client import Client
from kvass.connectors.sglang.plugin import backend_config
from tests.support.sglang.server import FLAGS

PAGE: Final = 64
TOKENS: Final = 1500
STORED_S: Final = 60.0


def engine(socket: str, model: str) -> Any:
    import sglang

    flags: dict[str, Any] = {name[2:].replace("-", "_"): text for name, text in FLAGS.items()}
    for name in ("mem_fraction_static", "hicache_ratio", "max_total_tokens"):
        flags[name] = json.loads(flags[name])
    extra = backend_config() | {"kvass.socket": socket, "prefetch_threshold": PAGE}
    return sglang.Engine(
        model_path=model,
        page_size=PAGE,
        skip_tokenizer_init=True,
        enable_hierarchical_cache=True,
        hicache_storage_backend="dynamic",
        hicache_storage_backend_extra_config=json.dumps(extra),
        **flags,
    )


def rows(socket: str) -> int:
    with Client(socket) as client:
        namespaces = client.status()["namespaces"]
    return sum(int(group["rows"]) for each in namespaces for group in each["groups"])


def main(socket: str, model: str, *all_weights: str) -> None:
    source = random.Random(1)
    prompt = [source.randrange(3, 1000) for _ in range(TOKENS)]
    params = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    for number, weights in enumerate(all_weights, 1):
        one = engine(socket, model)
        done, said, *_ = one.update_weights_from_disk(weights)
        assert done, said
        answer = one.generate(input_ids=prompt, sampling_params=params, return_logprob=True)
        deadline = time.monotonic() + STORED_S
        while rows(socket) < TOKENS // PAGE * number and time.monotonic() < deadline:
            time.sleep(0.1)
        one.shutdown()
        meta = answer["meta_info"]
        found = {
            "cached": meta["cached_tokens"],
            "rows": rows(socket),
            "logprobs": [each[0] for each in meta["output_token_logprobs"]],
        }
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
