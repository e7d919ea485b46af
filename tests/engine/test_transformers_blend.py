"""Blend in transformers: documents that were stored alone, and stand elsewhere in a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvass.blend.plan import none
from kvass.connectors.transformers import CachedModel, connect, kv_store
from kvass.connectors.transformers.blending import Blender
from kvass.connectors.transformers.model import new_cache, tensors_of
from kvass.errors import UsageError
from kvass.testing.daemon import Daemon
from tests.support import hf_models
from tests.support.hf_models import (
    CHUNK,
    CLOSE,
    FAMILIES,
    GREEDY,
    after_own_hit,
    join,
    logits,
    make,
    make_late,
    prompt,
)

answers, daemon = hf_models.answers, hf_models.daemon
DOCUMENTS = [prompt(2 * CHUNK, 10), prompt(CHUNK + 5, 11), prompt(3 * CHUNK, 12)]
QUESTION = prompt(23, 13)
SYSTEM = prompt(CHUNK + 9, 14)
RAG = torch.cat([SYSTEM, DOCUMENTS[2], DOCUMENTS[0], DOCUMENTS[2], DOCUMENTS[1], QUESTION], 1)
"""One of the documents stands in it twice, and of another the end is no whole chunk."""
BLENDED = 9 * CHUNK


@pytest.fixture
def cached(daemon: Daemon) -> Iterator[CachedModel]:
    with joined(daemon) as one:
        yield one
    daemon.wait_until(leases=0, reservations=0, pins=0)


def joined(daemon: Daemon, family: str = "llama", blend: str = "all") -> CachedModel:
    """A model that another process may have been: its documents are stored."""
    one = join(make(family), daemon.socket, blend=blend)
    assert [one.add(document) for document in DOCUMENTS] == [2 * CHUNK, CHUNK, 3 * CHUNK]
    return one


def plain(cached: CachedModel, ids: Any = RAG) -> Any:
    return logits(cached.model.generate(ids, **GREEDY))


@pytest.mark.parametrize("family", FAMILIES)
def test_all_computed_again_is_a_full_prefill(daemon: Daemon, family: str) -> None:
    with joined(daemon, family) as cached:
        right = plain(cached)
        output = logits(cached.generate(RAG, **GREEDY))
        np.testing.assert_allclose(output, right, **CLOSE)
        assert (output.argmax(1) == right.argmax(1)).all()
        assert (cached.last.blended, cached.last.recomputed) == (BLENDED, BLENDED)
        exact = prefill(cached.model)
        begin = cached._begin(RAG, "", cached._selection)
        assert begin is not None
        for ours, theirs in zip(begin.kv, exact, strict=True):
            np.testing.assert_allclose(ours, theirs[:, :, :-1], rtol=1e-5, atol=1e-5)
        assert not cached.counters


def prefill(model: Any) -> list[Any]:
    cache = new_cache(model)
    with torch.no_grad():
        model(input_ids=RAG, past_key_values=cache, use_cache=True)
    return tensors_of(cache)


@pytest.mark.parametrize("family", ["llama", "deepseek"])
def test_k_of_the_first_layer_is_what_a_prefill_computes_there(
    daemon: Daemon, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with joined(daemon, family) as cached:
        exact = prefill(cached.model)
        for part in (0, 1):
            begin = cached._begin(RAG, "", none)
            assert begin is not None
            np.testing.assert_allclose(begin.kv[part], exact[part][:, :, :-1], rtol=0, atol=1e-5)
        monkeypatch.setattr(Blender, "move", lambda *_: None)
        begin = cached._begin(RAG, "", none)
        assert begin is not None
        part = int(family == "deepseek")
        off = (begin.kv[part] - exact[part][:, :, :-1]).abs().max()
        assert off > 0.1, "control: K that was not moved"


def test_only_what_is_planned_is_computed(
    cached: CachedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedding, computed = torch.nn.functional.embedding, 0

    def count(ids: Any, *terms: Any) -> Any:
        nonlocal computed
        computed += ids.shape[1]
        return embedding(ids, *terms)

    monkeypatch.setattr(torch.nn.functional, "embedding", count)
    for blend, again in [("none", 0), ("first_k:8", 4 * 8), ("all", BLENDED)]:
        computed = 0
        cached.generate(RAG, blend=blend, salt="", max_new_tokens=1, do_sample=False)
        last = cached.last
        assert (last.blended, last.recomputed) == (BLENDED, again)
        assert computed == last.prompt - last.loaded - last.blended + again


def test_selectors_approximate_and_are_told_apart(
    cached: CachedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvass.connectors.transformers.blending.AT_ONCE", 100)
    right, found = plain(cached), []
    for blend in ("none", "first_k:16", "kv_dev:0.5", "kv_dev:1"):
        found.append(logits(cached.generate(RAG, blend=blend, **GREEDY))[0])
    errors = [float(np.abs(one - right[0]).max()) for one in found]
    assert errors[0] > 0.01, "control: segments know nothing of each other"
    assert errors[3] < 1e-4
    assert len(set(errors)) == 4


def test_what_was_blended_is_never_stored_or_found(cached: CachedModel, daemon: Daemon) -> None:
    mine = torch.cat([prompt(CHUNK + 3, 20), DOCUMENTS[1], prompt(3 * CHUNK, 21)], 1)
    rows = daemon.status()["rows"]
    cached.generate(mine, blend="none", **GREEDY)
    assert (cached.last.blended, cached.last.stored) == (CHUNK, CHUNK)
    assert daemon.status()["rows"] == rows + 1, "what stands before the segment is exact"
    right = after_own_hit(cached.model, mine, CHUNK)
    found = logits(cached.generate(mine, blend="", store_answer=False, **GREEDY))
    assert cached.last.loaded == CHUNK
    np.testing.assert_allclose(found, right, **CLOSE)
    shifted = torch.cat([prompt(3, 22), mine], 1)
    cached.generate(shifted, salt="", **GREEDY)
    assert cached.last.blended > CHUNK, "control: computed without blend, it is found"


def test_another_salt_or_rope_finds_nothing(cached: CachedModel, daemon: Daemon) -> None:
    cached.generate(RAG, salt="mine", **GREEDY)
    assert cached.last.blended == cached.last.loaded == 0
    other = make(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    with join(other, daemon.socket, blend="none") as another:
        another.generate(RAG, **GREEDY)
        assert another.last.blended == another.last.loaded == 0


def test_a_lease_that_lapsed_before_the_segments_were_read(
    cached: CachedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_late(cached, monkeypatch)
    np.testing.assert_array_equal(
        logits(cached.generate(RAG, blend="none", **GREEDY)), plain(cached)
    )
    assert cached.last.blended == 0
    assert cached.counters["load_late"] >= 1


def test_a_search_that_ctrl_c_ended_answers_no_later_one(
    cached: CachedModel, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ctrl_c(_: float) -> None:
        raise KeyboardInterrupt

    store, space = cached._store, Blender(cached.model).space("")
    mine, other = (ids[0].numpy().astype("<u4") for ids in (RAG, prompt(RAG.shape[1] + 1, 15)))
    with monkeypatch.context() as patch:
        patch.setattr(kv_store, "time", SimpleNamespace(sleep=ctrl_c))
        daemon.suspend()
        with pytest.raises(KeyboardInterrupt):
            store.find(mine, space)
        daemon.resume()
    assert not store.find(other, space).segments
    assert store.find(mine, space).segments, "control"


def test_a_selector_that_fails_costs_the_blend_only(cached: CachedModel) -> None:
    def broken(prompt: Any) -> Any:
        raise ValueError("of the caller")

    np.testing.assert_array_equal(
        logits(cached.generate(RAG, blend=broken, salt="s", **GREEDY)), plain(cached)
    )
    for document in DOCUMENTS:
        cached.add(document, salt="s")
    output = cached.generate(RAG, blend=broken, salt="s", store_answer=False, **GREEDY)
    np.testing.assert_allclose(logits(output), plain(cached), **CLOSE)
    assert cached.last.blended == 0


@pytest.mark.parametrize("text", ["half", "first_k:-1", "first_k:x", "kv_dev:2", "all:1", 2.0])
def test_a_blend_that_is_none_is_refused(text: Any) -> None:
    with pytest.raises(UsageError, match=r"first_k|kv_dev"):
        connect(make(), blend=text)


def test_a_model_that_cannot_be_blended_is_refused(tmp_path: Any) -> None:
    model = make()
    with connect(model, socket=str(tmp_path / "none"), wait_s=0) as one:
        with pytest.raises(UsageError, match="give connect a blend"):
            one.generate(QUESTION, blend="all")
        with pytest.raises(UsageError, match="give connect a blend"):
            one.add(QUESTION)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UsageError, match="attention with a mask, not 'flash_attention_2'"):
        Blender(model)
