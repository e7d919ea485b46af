"""An engine with a connector of its own: it loads the KV pages that other engines have computed.

``docs/connectors.md`` explains it, and ``kvass.testing.ConnectorSuite`` tests it.
``python -m examples.toy_engine`` starts a daemon and two engines. What a connector adds to an
engine is marked with ``kvass``.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvass import PageStore, Plane
from kvass.testing import running_daemon

LAYERS, WIDTH, VOCABULARY = 2, 8, 1000
PAGES, PAGE_TOKENS = 64, 16
PAGE_BYTES = PAGE_TOKENS * WIDTH * 8
"""The bytes of one layer's page."""
U64 = npt.NDArray[np.uint64]


class Model:
    """Stands for a transformer: the KV of a token follows from its weights and from all tokens up
    to it, and the next token from all of the KV. So one wrong byte changes the answer."""

    def __init__(self, weights: str) -> None:
        seed = int.from_bytes(hashlib.sha256(weights.encode()).digest()[:8], "little")
        random = np.random.default_rng(seed)
        self.weights: U64 = random.integers(1, 1 << 63, (LAYERS, WIDTH), np.uint64)

    def kv_of(self, token: int, before: U64) -> U64:
        """The KV of one token in each layer. ``before``: that of the token before it."""
        mixed = (before ^ (before >> np.uint64(29))) * (self.weights | np.uint64(1))
        kv: U64 = mixed + np.uint64(token + 1) * self.weights
        return kv

    def next_token(self, kv: U64) -> int:
        return int(kv.sum(dtype=np.uint64)) % VOCABULARY


class Engine:
    """Answers one prompt at a time. Its KV is in ``PAGES`` pages in each layer."""

    def __init__(self, socket: str, weights: str = "weights 1", tenant: str = "") -> None:
        self.model = Model(weights)
        self.kv: U64 = np.zeros((LAYERS, PAGES, PAGE_TOKENS, WIDTH), np.uint64)
        self.free = list(range(PAGES))
        self.loaded = 0
        """How many tokens of the last prompt were loaded."""
        # kvass: what changes the bytes of pages, and where they lie
        self.store = PageStore(
            socket,
            {"engine": "toy 1", "weights": weights},
            self.planes(),
            [self.kv.reshape(-1).view(np.uint8)],
            PAGE_TOKENS,
            PAGES,
            name="toy",
            tenant=tenant,
        )

    def planes(self) -> list[Plane]:
        # kvass: a page of each layer is contiguous, and so are all pages of a layer
        return [Plane(i * PAGES * PAGE_BYTES, PAGE_BYTES, PAGE_BYTES) for i in range(LAYERS)]

    def generate(self, prompt: list[int], count: int = 4) -> list[int]:
        """``count`` tokens that follow ``prompt``."""
        needed = -(-(len(prompt) + count) // PAGE_TOKENS)
        pages, self.free = self.free[:needed], self.free[needed:]
        try:
            # kvass: load the longest prefix; at least the last token is computed
            keys = keys_of(prompt)[: (len(prompt) - 1) // PAGE_TOKENS]
            hit = self.store.get(keys, pages[: len(keys)])
            self.loaded = hit * PAGE_TOKENS
            tokens = list(prompt)
            self._compute(tokens, pages, self.loaded)
            for _ in range(count):
                every = self.kv[:, pages].reshape(LAYERS, -1, WIDTH)
                tokens.append(self.model.next_token(every[:, : len(tokens)]))
                self._compute(tokens, pages, len(tokens) - 1)
            # kvass: store the whole pages that are new
            keys = keys_of(tokens)
            self.store.put(keys[hit:], pages[hit : len(keys)], keys[:hit])
            return tokens[len(prompt) :]
        finally:
            self.free += pages

    def _compute(self, tokens: list[int], pages: list[int], first: int) -> None:
        """Write the KV of the tokens from number ``first`` on."""
        last = np.zeros((LAYERS, WIDTH), np.uint64)
        if first:
            last = self.kv[:, pages[(first - 1) // PAGE_TOKENS], (first - 1) % PAGE_TOKENS]
        for at in range(first, len(tokens)):
            last = self.model.kv_of(tokens[at], last)
            self.kv[:, pages[at // PAGE_TOKENS], at % PAGE_TOKENS] = last

    def replace_weights(self, weights: str) -> None:
        # kvass: before the new weights compute anything
        self.store.new_generation(weights.encode())
        self.model = Model(weights)

    def close(self) -> None:
        self.store.close()


def keys_of(tokens: list[int]) -> list[bytes]:
    """A key for each whole page: a digest of all tokens up to its end."""
    raw, chain, keys = np.array(tokens, "<u4"), hashlib.sha256(), []
    for end in range(PAGE_TOKENS, len(tokens) + 1, PAGE_TOKENS):
        chain.update(raw[end - PAGE_TOKENS : end].tobytes())
        keys.append(chain.digest())
    return keys


def run(socket: str) -> list[int]:
    """One engine answers one prompt; its answer."""
    engine = Engine(socket)
    try:
        engine.store.wait_connected(10)
        answer = engine.generate([7 * i % VOCABULARY for i in range(100)])
        print(f"{engine.loaded} of 100 tokens were loaded; the answer is {answer}")
        return answer
    finally:
        engine.close()


def main(argv: list[str] | None = None) -> int:
    """One engine with the daemon of ``--socket``, or two with one of its own; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.toy_engine")
    parser.add_argument("--socket", help="run one engine (default: start a daemon, run two)")
    if socket := parser.parse_args(argv).socket:
        return 0 if run(socket) else 1
    with tempfile.TemporaryDirectory() as folder, running_daemon(Path(folder)) as daemon:
        return 0 if run(daemon.socket) == run(daemon.socket) else 1


if __name__ == "__main__":
    sys.exit(main())
