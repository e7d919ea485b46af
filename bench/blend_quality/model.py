"""The small model of the task: a Llama, its training, and the weights that it gave."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.blend_quality import task
from kvass.cli.bench.rig import say

WEIGHTS: Final = Path(__file__).parent / "weights.safetensors"
SEED: Final = 0
STAGES: Final = ((1, 300), (2, 200), (task.DOCUMENTS, 800))
"""Documents in a prompt, and steps with them. The last stage's rate falls to zero."""
BATCH: Final = 12
"""Prompts of the last stage in a step; shorter prompts: as many as have the same documents."""
RATE: Final = 2e-3
HIDDEN: Final = 96
LAYERS: Final = 3


def llama(hidden: int, layers: int, vocabulary: int, **more: Any) -> Any:
    """Random weights; heads of 32 numbers."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        head_dim=32,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        **more,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def untrained() -> Any:
    """Statements about the same entity, variable or value begin alike."""
    torch.manual_seed(SEED)
    model = llama(HIDDEN, LAYERS, task.VOCABULARY, initializer_range=0.08)
    table = model.model.embed_tokens.weight.data.normal_(0, 0.7)
    entities, variables, values, kinds = (
        0.7 * torch.randn(count, HIDDEN)
        for count in (task.ENTITIES, task.VARIABLES, task.VALUES, 3)
    )
    table[task.GIVES : task.TAKES] = (variables[:, None] + values + kinds[0]).flatten(0, 1)
    table[task.TAKES : task.ASKS] = (entities[:, None] + variables + kinds[1]).flatten(0, 1)
    table[task.ASKS : task.VALUE] = entities + kinds[2]
    return model


def trained() -> Any:
    """The model with the weights in the repository."""
    model = untrained()
    model.load_state_dict({name: t.float() for name, t in load_file(WEIGHTS).items()})
    return model


def train() -> Any:
    """Train from the seed and write the weights, in float16.

    ``e := x`` is judged after the first layer, questions after the last: so the answer is in a
    document's KV before a question reads it.
    """
    model, random = untrained(), np.random.default_rng(SEED)
    step = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01, betas=(0.9, 0.98))
    done, total = 0, sum(steps for _, steps in STAGES)
    for documents, steps in STAGES:
        for _ in range(steps):
            done += 1
            last = min(1.0, (total - done) / STAGES[-1][1])
            step.param_groups[0]["lr"] = RATE * min(last, done / 100)
            count = BATCH * task.DOCUMENTS // documents
            losses, right = _losses(model, [task.prompt(random, documents) for _ in range(count)])
            step.zero_grad()
            losses.sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            step.step()
            if done % 50 == 0:
                say(f"step {done}, documents {documents}: questions right {right:.3f}")
    save_file({name: t.half().contiguous() for name, t in model.state_dict().items()}, WEIGHTS)
    return trained()


def _losses(model: Any, batch: list[task.Asked]) -> tuple[torch.Tensor, float]:
    """[2]: of statements and of questions; and the share of questions that are answered."""
    tokens = torch.from_numpy(np.stack([one.tokens for one in batch]))
    labels = torch.from_numpy(np.stack([one.labels for one in batch]))
    out = model.model(tokens, output_hidden_states=True)
    taken = (labels != task.NO_LABEL) & (tokens < task.ASKS)
    asked = (labels != task.NO_LABEL) & ~taken
    early = model.lm_head(model.model.norm(out.hidden_states[1][taken]))
    late = model.lm_head(out.last_hidden_state[asked])
    loss = torch.nn.functional.cross_entropy
    right = float((late.argmax(-1) == labels[asked]).float().mean())
    return torch.stack((loss(early, labels[taken]), 2 * loss(late, labels[asked]))), right
