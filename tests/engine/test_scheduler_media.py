"""Images, videos and sounds: a request is served only if the ids of its items say what is in them.

vLLM's block hashes have the ids, and it takes those of clients as they are.
"""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from tests.support.vllm.fake_client import FakeClient
from tests.support.vllm.scheduler import SchedulerHarness

CONTENT = hashlib.sha256(b"an image").hexdigest()
LONG = hashlib.sha512(b"an image").hexdigest()


def item(identifier: str, content: str | None = "") -> Any:
    """An item as vLLM gives it to the scheduler; ``content``: vLLM's ``mm_hash``, if another."""
    import torch
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    nothing_to_encode = torch.zeros(20, dtype=torch.bool)
    where = PlaceholderRange(offset=40, length=20, is_embed=nothing_to_encode)
    known = identifier if content == "" else content
    return MultiModalFeatureSpec(None, "image", identifier, where, known)


def served(*items: Any, options: dict[str, object] | None = None) -> tuple[int, int]:
    """How many chunks two engines store of a prompt with ``items``, and how many they look up."""
    client = FakeClient()
    for name in ("first", "second"):
        world = SchedulerHarness(client, options=options)
        world.add(name, range(100), max_tokens=1).mm_features = list(items)
        for _ in range(8):
            output, work = world.schedule()
            client.commit(store.reservation for store in work.stores)
            received = [load.request for load in work.loads]
            world.finish(output, reported=list(world.open_steps), received=received)
        assert not world.scheduler.has_requests()
    return len(client.rows), len(client.lookups)


@pytest.mark.parametrize(
    "items",
    [
        [],
        [item(CONTENT)],
        [item(LONG)],
        [item(CONTENT, None)],
        [item(f"adapter:{CONTENT}", CONTENT)],
        [item(CONTENT), item(LONG)],
    ],
    ids=["text", "sha256", "sha512", "old vLLM", "adapter", "two"],
)
def test_what_vllm_hashed_is_served(items: list[Any]) -> None:
    assert served(*items) == (3, 2)


@pytest.mark.parametrize(
    "items",
    [
        [item("logo.png")],
        [item("01234567-89ab-4cde-8f01-23456789abcd")],
        [item("renderer0-mm-1-image-0")],
        [item(CONTENT.upper())],
        [item(CONTENT[:-1])],
        [item(CONTENT + "\n")],
        [item("adapter:logo.png", "logo.png")],
        [item(f"adapter:{CONTENT}", None)],
        [item("logo.png", CONTENT)],
        [item(CONTENT), item("logo.png")],
        [item("")],
    ],
    ids=lambda items: items[-1].identifier[:20],
)
def test_what_a_client_named_runs_uncached(items: list[Any]) -> None:
    """An id like that may be another image's for another engine, or next year."""
    assert served(*items) == (0, 0)
    assert served(*items, options={"kvass.global_media_ids": True}) == (3, 2), "it was told"
