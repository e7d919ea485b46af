"""kvass in transformers: real models, real daemons, prompts whose beginning another computed."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvass.connectors.transformers import CachedModel, connect, identity
from kvass.connectors.transformers.rows import BLOCK, KV, Rows
from kvass.engine.identity import digest
from kvass.errors import UsageError
from kvass.testing.daemon import Daemon, running_daemon
from tests.support import hf_models
from tests.support.hf_models import (
    CHUNK,
    CLOSE,
    FAMILIES,
    GREEDY,
    LATENT,
    PROMPT,
    SIZES,
    after_own_hit,
    join,
    logits,
    make,
    make_late,
    plain,
    prompt,
)

answers, daemon = hf_models.answers, hf_models.daemon
WHOLE = (PROMPT.shape[1] - 1) // BLOCK * BLOCK
"""The longest hit of ``PROMPT``: to its last block, without its last token."""


@pytest.fixture(scope="module")
def computed(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The logits of a process of its own, which computed ``PROMPT`` with each model and ended."""
    folder = tmp_path_factory.mktemp("computed")
    command = [sys.executable, "-m", "tests.support.hf_models", daemon.socket, str(folder)]
    subprocess.run(command, check=True)
    return folder


def run(cached: CachedModel, ids: Any = PROMPT, **options: Any) -> tuple[Any, int]:
    """The logits, and how many tokens were loaded. kvass failed in nothing."""
    output = cached.generate(ids, **GREEDY, **options)
    assert not cached.counters
    return logits(output), cached.last.loaded


@pytest.mark.parametrize("family", FAMILIES)
def test_what_another_process_computed_is_loaded_and_right(
    daemon: Daemon, computed: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(family)
    cold = np.load(computed / f"{family}.npy")
    np.testing.assert_allclose(cold, plain(model, PROMPT), **CLOSE)
    right = after_own_hit(model, PROMPT, WHOLE)
    with join(model, daemon.socket) as cached:
        found, loaded = run(cached)
        assert loaded == WHOLE
        np.testing.assert_allclose(found, right, **CLOSE)

        load = Rows.load

        def zero_one_row(self: Rows, arena: Any, offset: int, kv: KV, at: int, n: int) -> None:
            load(self, arena, offset, kv, at, n)
            for tensor in kv if at == CHUNK else ():
                tensor[:, :, at : at + n * BLOCK] = 0

        monkeypatch.setattr(Rows, "load", zero_one_row)
        wrong, loaded = run(cached)
        assert loaded == WHOLE
        assert not np.allclose(wrong, right, **CLOSE), "control: a row that is not there"
    daemon.wait_until(leases=0, reservations=0, pins=0)


def test_a_hit_ends_at_the_block_where_prompts_part(daemon: Daemon) -> None:
    model = make()
    ids = prompt(150, seed=2)
    other = torch.cat([ids[:, :103], prompt(60, seed=3)], 1)
    with join(model, daemon.socket) as cached:
        run(cached, ids, store_answer=False)
        assert cached.last.stored == 144, "a tail to the last whole block"
        found, loaded = run(cached, other)
        assert loaded == 96
        right = after_own_hit(model, other, loaded, stored=ids)
        np.testing.assert_allclose(found, right, **CLOSE)
        answered = cached.model.generate(other, max_new_tokens=20, do_sample=False)
        cached.generate(other, max_new_tokens=20, do_sample=False)
        _, loaded = run(cached, torch.cat([answered, ids[:, :3]], 1))
        assert loaded == (163 + 19) // BLOCK * BLOCK, "the answer was stored, too"


def test_a_session_ends_and_a_prompt_is_retained_by_keyword(daemon: Daemon) -> None:
    def counter(name: str) -> int:
        return int(daemon.status()["counters"][name])

    with join(make(), daemon.socket) as cached:
        kept = daemon.status()["l1_kept_bytes"]
        run(cached, prompt(150, seed=40), ttl="5m")
        assert daemon.status()["l1_kept_bytes"] > kept
        ended, rows = counter("sessions_ended"), counter("session_rows_ended")
        for tokens in (150, 200):
            run(cached, prompt(tokens, seed=41), session="s")
        assert counter("sessions_ended") == ended
        run(cached, prompt(200, seed=41), session="s", ttl=0)
        run(cached, prompt(20, seed=42))  # answered after the end of the session was carried out
        assert counter("sessions_ended") == ended + 1
        assert counter("session_rows_ended") > rows
        with pytest.raises(UsageError, match="ttl 'soon': 0, seconds up to 86400"):
            cached.generate(PROMPT, ttl="soon")


def changed_byte(model: Any) -> Any:
    weight = model.model.layers[1].mlp.down_proj.weight
    with torch.no_grad():
        weight.view(torch.uint8)[5, 8] ^= 1
    return model


OTHERS = {
    "one byte of a weight": lambda: changed_byte(make()),
    "attention": lambda: make(attn_implementation="eager"),
    "rope": lambda: make(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    "precision": lambda: make().to(torch.bfloat16),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_model_that_differs_shares_nothing(daemon: Daemon, computed: Path, what: str) -> None:
    with join(OTHERS[what](), daemon.socket) as cached:
        assert run(cached)[1] == 0
        assert run(cached)[1] == WHOLE, "control: it has a namespace of its own"


def test_a_tag_or_a_salt_shares_nothing(daemon: Daemon, computed: Path) -> None:
    with join(make(), daemon.socket) as cached:
        assert run(cached, salt="mine")[1] == 0
        assert run(cached, salt="mine")[1] == WHOLE
        assert run(cached)[1] == WHOLE
    with join(make(), daemon.socket, tag="another") as cached:
        assert run(cached)[1] == 0


def test_a_model_that_changed_after_connect_runs_uncached(daemon: Daemon, computed: Path) -> None:
    model = make()
    with join(model, daemon.socket) as cached:
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(2)
        rows = daemon.status()["rows"]
        found = logits(cached.generate(PROMPT, **GREEDY))
        np.testing.assert_array_equal(found, plain(model, PROMPT))
        assert cached.last == type(cached.last)(PROMPT.shape[1], 0, 0)
        assert cached.counters == {"changed": 1}
        assert daemon.status()["rows"] == rows


def test_weights_at_the_address_of_others_are_seen(daemon: Daemon, computed: Path) -> None:
    """A tensor is freed, and another, never written to since it was made, lies in its place."""
    model = make()
    mlp = model.model.layers[0].mlp
    with torch.no_grad():
        place = mlp.down_proj.weight.numpy().copy()
    mlp.down_proj.weight = torch.nn.Parameter(torch.from_numpy(place))
    address = mlp.down_proj.weight.data_ptr()
    with join(model, daemon.socket) as cached:
        assert run(cached)[1] == WHOLE, "the weights are those of before"
        mlp.down_proj.weight = None
        place *= 2
        mlp.down_proj.weight = torch.nn.Parameter(torch.from_numpy(place))
        assert (mlp.down_proj.weight.data_ptr(), mlp.down_proj.weight._version) == (address, 0)
        found = logits(cached.generate(PROMPT, **GREEDY))
        np.testing.assert_array_equal(found, plain(model, PROMPT))
        assert cached.counters == {"changed": 1}


def another_view(model: Any, patch: pytest.MonkeyPatch) -> None:
    projection = model.model.layers[0].self_attn.q_proj.weight
    assert projection.shape[0] == projection.shape[1]
    patch.setattr(projection, "data", projection.data.t())


def other_tensor(model: Any, patch: pytest.MonkeyPatch) -> None:
    """Of a model that holds one which is neither a parameter nor a buffer."""
    model.model.layers[0].mlp.extra = [torch.ones(2)]


def other_function(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.model.layers[0].mlp.gate = torch.nn.functional.relu


def other_list(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.model.layers[0].mlp.sizes = [1, 2]


def other_scale(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(model.model.layers[0].self_attn, "scaling", 0.9)


def other_activation(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(model.model.layers[0].mlp, "act_fn", torch.nn.ReLU())


def other_config(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(model.config, "sliding_window", 32, raising=False)


def other_precision(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")


def other_forward(model: Any, patch: pytest.MonkeyPatch) -> None:
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    patch.setattr(mlp, "forward", lambda x: forward(x) / 2)


def other_class(model: Any, patch: pytest.MonkeyPatch) -> None:
    kind = type(model.model.layers[0].mlp)
    forward = kind.forward
    patch.setattr(kind, "forward", lambda self, x: forward(self, x) / 2)


def other_attention(model: Any, patch: pytest.MonkeyPatch) -> None:
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    mine = {"sdpa": lambda *given, **named: sdpa(*given, **(named | {"scaling": 0.9}))}
    patch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", mine)


def hook_on_all(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(torch.nn.modules.module._global_forward_hooks, 0, lambda *_: None)


@pytest.mark.parametrize(
    "change",
    [
        another_view,
        other_tensor,
        other_function,
        other_list,
        other_scale,
        other_activation,
        other_config,
        other_precision,
        other_forward,
        other_class,
        other_attention,
        hook_on_all,
    ],
)
def test_what_computes_something_else_shares_nothing(
    daemon: Daemon, computed: Path, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    """A change after ``connect`` makes calls uncached. One before it is another namespace, or is
    refused."""
    model = make()
    with join(model, daemon.socket) as cached:
        change(model, monkeypatch)
        cached.generate(PROMPT, max_new_tokens=1)
        assert (cached.last.loaded, cached.last.stored) == (0, 0)
        assert cached.counters == {"changed": 1}
    refused = ""
    try:
        with join(model, daemon.socket) as cached:
            cached.generate(PROMPT, max_new_tokens=1, store_answer=False)
            assert cached.last.loaded == 0
    except UsageError as error:
        refused = str(error)
    assert not refused or re.search("forward|attention|hook|layers of kind", refused)


CODE = """
import torch

class Model(torch.nn.Module):
    @torch.no_grad()
    def forward(self, x):
        return x * {} if type(x) in {{int, float, str}} else x
"""


def test_code_is_what_was_imported_and_not_what_its_file_became(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def imported(factor: int) -> Any:
        (tmp_path / "edited.py").write_text(CODE.format(factor))
        monkeypatch.delitem(sys.modules, "edited", raising=False)
        importlib.invalidate_caches()
        return importlib.import_module("edited").Model()

    def name(model: Any) -> str:
        return digest(identity._modules(model))

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    old = imported(1)
    first = name(old)
    new = imported(2)
    assert len({first, name(old), name(new)}) == 3
    assert name(imported(1)) == first


def test_a_daemon_that_dies_costs_hits_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    right = plain(model, PROMPT)
    with (
        running_daemon(tmp_path, l1_size="64MiB", lookup_budget_ms=10_000) as daemon,
        join(model, daemon.socket) as cached,
    ):
        run(cached)
        taken = cached._store._scheduler.take

        def take_and_kill(name: str) -> Any:
            match = taken(name)
            daemon.kill()
            return match

        with monkeypatch.context() as patch:
            patch.setattr(cached._store._scheduler, "take", take_and_kill)
            np.testing.assert_allclose(logits(cached.generate(PROMPT, **GREEDY)), right, **CLOSE)
        np.testing.assert_array_equal(logits(cached.generate(PROMPT, **GREEDY)), right)
        assert cached.last.loaded == 0
        daemon.start()
        assert cached.wait_connected(30.0)
        run(cached)
        assert run(cached)[1] == WHOLE


def test_a_load_that_ends_late_is_a_miss(
    daemon: Daemon, computed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    with join(model, daemon.socket) as cached:
        make_late(cached, monkeypatch)
        np.testing.assert_array_equal(
            logits(cached.generate(PROMPT, **GREEDY)), plain(model, PROMPT)
        )
        assert cached.last.loaded == 0
        assert cached.counters == {"load_late": 1}
    daemon.wait_until(leases=0, pins=0)


CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "give one prompt": (torch.ones(2, 5, dtype=torch.int64), {}),
    "token ids": ([1, 2, 3], {}),
    "with position_ids": (PROMPT, {"position_ids": torch.arange(9)[None]}),
    "with past_key_values": (PROMPT, {"past_key_values": None}),
    "with padding": (PROMPT, {"attention_mask": (PROMPT > 5).long()}),
    "with the padding token": (PROMPT, {"pad_token_id": int(PROMPT[0, 3])}),
    "with cache_implementation": (PROMPT, {"cache_implementation": "static"}),
    "without use_cache": (PROMPT, {"use_cache": False}),
    "as beam_search": (PROMPT, {"generation_config": transformers.GenerationConfig(num_beams=2)}),
    "with assistant_model": (PROMPT, {"assistant_model": None}),
    "with token_healing": (PROMPT, {"token_healing": True, "tokenizer": None}),
}


@pytest.mark.parametrize("text", CALLS)
def test_a_call_that_cannot_be_served_is_refused(text: str, tmp_path: Path) -> None:
    ids, arguments = CALLS[text]
    with connect(make(), socket=str(tmp_path / "none"), wait_s=0) as cached:
        with pytest.raises(UsageError, match=text):
            cached.generate(ids, **arguments)
        assert run(cached, store_answer=True)[1] == 0, "without a daemon it still serves"


VISION = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "image_size": 32}


def tiny(name: str, config: str, **settings: Any) -> Any:
    return getattr(transformers, name)(getattr(transformers, config)(**settings)).eval()


MODELS: dict[str, Any] = {
    "encoder-decoder": lambda: tiny("T5Model", "T5Config", d_model=8, d_ff=8, num_layers=1),
    "DynamicSlidingWindowLayer": lambda: make("mistral", sliding_window=32),
    "states besides K and V": lambda: tiny(
        "MambaForCausalLM", "MambaConfig", hidden_size=8, num_hidden_layers=1
    ),
    "the prompt's length": lambda: make(
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    ),
    "training mode": lambda: make().train(),
    "more than text": lambda: tiny(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        text_config=transformers.LlamaConfig(**SIZES),
        vision_config=transformers.CLIPVisionConfig(**VISION),
    ),
    "device 'meta'": lambda: make().to("meta"),
    "later tokens": lambda: make(is_causal=False),
    "does not use the cache": lambda: tiny("BertLMHeadModel", "BertConfig", **SIZES),
}


@pytest.mark.parametrize("text", MODELS)
def test_a_model_that_cannot_be_cached_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=text):
        connect(MODELS[text]())


def test_a_hook_on_a_module_makes_a_call_uncached(daemon: Daemon, computed: Path) -> None:
    model = make()
    with join(model, daemon.socket) as cached:
        hook = model.model.layers[0].register_forward_hook(lambda *_: None)
        cached.generate(PROMPT, **GREEDY)
        assert cached.last.loaded == 0
        assert cached.counters == {"changed": 1}
        hook.remove()
        cached.generate(PROMPT, **GREEDY)
        assert cached.last.loaded == WHOLE


def test_rows_are_of_the_models_own_shapes() -> None:
    """Of MLA the latent is stored, and not what is made of it."""
    from kvass.connectors.transformers.model import probe

    kv = probe(make("deepseek"))
    assert Rows(kv, CHUNK).shapes == [(1, LATENT["kv_lora_rank"]), (1, 16)] * 2
