"""A prefix-aware round-robin router for vLLM engines, by their KV events.

Each engine publishes which blocks it has: in its own cache (medium ``GPU``) and, with kvass, on its
machine (``CPU``). The router keeps an index of them. It sends a prompt to the engines with the
longest cached prefix, in turn; if none has any, to all of them in turn.

    python examples/router.py tcp://host-a:5557=tcp://host-a:5558 tcp://host-b:5557

Each argument is an engine's event endpoint, with its replay endpoint if it has one. Each line of
stdin is a prompt, a JSON list of token ids; printed are the engine to ask and the cached tokens.
``docs/events.md`` says how to start the engines.

``tests/engine/test_router.py`` compares it with blind round robin: two engines on two machines, six
conversations of 5 turns in random order, each turn with all turns before. With this router 64 % of
the prompts' tokens are cached where they are sent, with blind round robin 47 %.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
import zmq

FULL: Final = (None, "full_attention", "mla_attention")
"""Groups of other kinds do not decide how long a cached prefix is."""
REPLAY_MS: Final = 1000
END: Final = (-1).to_bytes(8, "big", signed=True)


class KVIndex:
    """The blocks that one engine has. A block is known by its tokens and all before them."""

    def __init__(self) -> None:
        self.block_size = 0
        self.held: dict[bytes, set[tuple[str, int | None]]] = {}
        """By block: medium and group of each copy."""
        self._names: dict[Any, bytes] = {}
        """vLLM's hash -> block."""

    def apply(self, event: dict[str, Any]) -> None:
        """Take in one event."""
        if event["type"] == "AllBlocksCleared":
            self.held.clear()
        elif event["type"] == "BlockRemoved":
            where = event["medium"], event.get("group_idx")
            for each in event["block_hashes"]:
                self._removed(self._names.get(each, b""), where)
        elif event.get("kv_cache_spec_kind") in FULL:
            self._stored(event)

    def _stored(self, event: dict[str, Any]) -> None:
        parent = event["parent_block_hash"]
        if parent is not None and parent not in self._names:
            return  # what it follows was announced before we listened
        block, size = b"" if parent is None else self._names[parent], event["block_size"]
        self.block_size = size
        extra = event.get("extra_keys") or [None] * len(event["block_hashes"])
        where = event["medium"], event.get("group_idx")
        for i, each in enumerate(event["block_hashes"]):
            block = name(block, event["token_ids"][i * size : (i + 1) * size], extra[i])
            self._names[each] = block
            self.held.setdefault(block, set()).add(where)

    def _removed(self, block: bytes, where: tuple[str, int | None]) -> None:
        copies = self.held.get(block, set())
        copies.discard(where)
        if not copies:
            self.held.pop(block, None)

    def cached(self, tokens: Sequence[int], media: Iterable[str] = ("GPU", "CPU")) -> int:
        """How many tokens of a prompt, from its beginning, are cached in any of ``media``."""
        block, end, wanted = b"", 0, set(media)
        while self.block_size and end + self.block_size <= len(tokens):
            block = name(block, tokens[end : end + self.block_size], None)
            if wanted.isdisjoint(medium for medium, _ in self.held.get(block, ())):
                break
            end += self.block_size
        return end

    def clear(self) -> None:
        """Nothing is known any more."""
        self.held.clear()
        self._names.clear()


def name(parent: bytes, tokens: Sequence[int], extra: Any) -> bytes:
    """A block's name. ``extra``: what else it depends on: LoRA adapter, images, salt."""
    said = json.dumps([list(tokens), extra], default=str)
    return hashlib.blake2b(parent + said.encode(), digest_size=16).digest()


class Subscriber:
    """One engine's events, in order. What was missed is asked for again; if the engine does not
    have it any more, the index begins anew and fills as blocks are stored and used."""

    def __init__(self, endpoint: str, replay: str = "") -> None:
        self.index = KVIndex()
        self.gaps = 0
        """Times that messages were missed for good."""
        self._next = 0
        context: zmq.Context[Any] = zmq.Context.instance()
        self._events = context.socket(zmq.SUB)
        self._events.subscribe(b"")
        self._events.connect(endpoint)
        self._replay_endpoint = replay
        self._ask_again()

    def poll(self, timeout_ms: int = 0) -> KVIndex:
        """Take in what has arrived; the index."""
        while self._events.poll(timeout_ms):
            _, seq, payload = self._events.recv_multipart()
            self._take(int.from_bytes(seq, "big"), payload)
            timeout_ms = 0
        return self.index

    def _take(self, seq: int, payload: bytes) -> None:
        if 0 < seq < self._next:
            return  # a replay had it
        if seq == 0:
            self._next = 0  # the engine was started again
            self.index.clear()
        if seq != self._next:
            self._ask_again(seq)
        if seq != self._next:
            self.gaps += self._next > 0
            self.index.clear()
        self._apply(seq, payload)

    def _apply(self, seq: int, payload: bytes) -> None:
        _, events, *_ = msgspec.msgpack.decode(payload)
        for event in events:
            self.index.apply(event)
        self._next = seq + 1

    def _ask_again(self, before: int = sys.maxsize) -> None:
        """Have what is missing before message ``before`` sent once more, as far as the engine
        remembers it. What comes after it is on its way without asking."""
        if not self._replay_endpoint:
            return
        # A socket of its own: an answer that comes too late is not taken for the next one.
        replay: zmq.Socket[Any] = zmq.Context.instance().socket(zmq.DEALER)
        with replay:
            replay.linger = 0
            replay.connect(self._replay_endpoint)
            replay.send_multipart([b"", self._next.to_bytes(8, "big")])
            while replay.poll(REPLAY_MS):
                *_, seq, payload = replay.recv_multipart()
                if seq == END:
                    return
                if self._next <= (number := int.from_bytes(seq, "big")) < before:
                    if number != self._next:
                        self.gaps += self._next > 0
                        self.index.clear()
                    self._apply(number, payload)

    def close(self) -> None:
        """Close the socket."""
        self._events.close(linger=0)


class Router:
    """Chooses among engines by their number."""

    def __init__(self, engines: Sequence[KVIndex]) -> None:
        self._engines = engines
        self._turns = itertools.count()

    def choose(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The engine for a prompt, and how many of its tokens are cached there."""
        cached = [index.cached(tokens) for index in self._engines]
        best = [i for i, n in enumerate(cached) if n == max(cached)]
        chosen = best[next(self._turns) % len(best)]
        return chosen, cached[chosen]


def main(arguments: list[str]) -> None:
    """Route the prompts of stdin."""
    engines = [Subscriber(*argument.split("=")) for argument in arguments]
    router = Router([engine.index for engine in engines])
    for line in sys.stdin:
        for engine in engines:
            engine.poll()
        print(*router.choose(json.loads(line)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
