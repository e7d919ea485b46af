"""Inputs other than tokens: a request is served only if its block hashes say all of its content.

Images, videos and sounds: the hashes have their ids, and vLLM takes those of clients as they are.
Prompt embeds: the hashes have their bytes, and not how they are read.
"""

from __future__ import annotations

import hashlib
import inspect
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


@pytest.fixture(scope="module")
def as_zeros() -> Any:
    """The embeds of 100 tokens in the data type of the test's model."""
    import torch

    return torch.zeros(100, 4, dtype=torch.bfloat16)


def served_embeds(embeds: Any, mask: list[bool] | None) -> tuple[int, int, str]:
    """``served`` of a prompt of embeds, and what the second engine said in ``kvass explain``."""
    client = FakeClient()
    for name in ("first", "second"):
        world = SchedulerHarness(client)
        request = world.add(name, [0] * 100, max_tokens=1)
        request.prompt_embeds, request.prompt_is_token_ids = embeds, mask
        world.run(client)
    whys = {note.why for note in client.notes if note.request == "second"}
    return len(client.rows), len(client.lookups), "".join(whys)


def test_embeds_run_uncached_where_hashes_do_not_say_how_they_are_read(as_zeros: Any) -> None:
    """vLLM 0.30 to 0.33 gives such requests each other's KV within one engine."""
    import torch

    assert served_embeds(as_zeros, None) == (3, 2, "")
    mixed = [n % 2 == 0 for n in range(100)]
    assert served_embeds(as_zeros, mixed) == (0, 0, "no_hashes")
    assert served_embeds(as_zeros.view(torch.float16), None) == (0, 0, "no_hashes")


def test_vllm_hashes_the_same_embeds_with_another_mask_as_equal() -> None:
    """The reason for the rule. If this fails, vLLM tells them apart, and they may be served."""
    import torch

    embeds = torch.ones(100, 4, dtype=torch.bfloat16)
    masks = [[n % 2 == parity for n in range(100)] for parity in (0, 1)]
    one, other = (block_hashes(embeds, mask) for mask in masks)
    assert one
    assert one == other
    assert block_hashes(embeds * 2, masks[0]) != one


def block_hashes(embeds: Any, mask: list[bool]) -> list[bytes]:
    """vLLM's hashes of a prompt of token 0 with ``embeds`` where ``mask`` is False."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    request = Request(
        request_id="embeds",
        prompt_token_ids=[0] * len(embeds),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        prompt_embeds=embeds,
        prompt_is_token_ids=mask,
        block_hasher=get_request_block_hasher(16, sha256),
    )
    return list(request.block_hashes)


IN_HASHES = "prompt_token_ids prompt_embeds mm_features lora_request cache_salt block_hasher"
"""Inputs of a request that its block hashes have."""
CHANGES_NO_KV = """
    request_id sampling_params pooling_params client_index arrival_time priority trace_headers
    resumable session_id reasoning_ended reasoning_parser_kwargs abort_immediately kv_hints
"""
"""Those that change no KV of a token."""
RUN_UNCACHED = "prompt_is_token_ids"
"""Those of ``content.is_named``."""


def test_every_input_of_a_request_is_in_its_hashes_or_changes_no_kv_or_is_refused() -> None:
    from vllm.v1.request import Request

    decided = f"{IN_HASHES} {CHANGES_NO_KV} {RUN_UNCACHED}".split()
    inputs = set(inspect.signature(Request.__init__).parameters) - {"self"}
    assert inputs - set(decided) == set(), "decide whether they change KV"
