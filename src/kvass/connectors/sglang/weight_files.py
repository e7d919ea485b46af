"""The files from which SGLang loads weights. ``kvass.engine.weights`` names them by their content.

Laws of this file:

- It never uses the network.
- Each file of a model's folder counts, except those that only make text of tokens. So a file that
  is new in a later version counts.
- Weights that come from a place that cannot be inspected have no name. The user may give one
  (``kvass.model_id``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from kvass.engine import weights
from kvass.engine.identity import Indescribable
from kvass.engine.model_files import Hub, files_below
from kvass.engine.weights import NAME_IT, Source

KNOWN_FORMATS: Final = frozenset(
    (
        *("auto", "safetensors", "pt", "npcache", "gguf", "mistral", "fastsafetensors"),
        *("instanttensor", "bitsandbytes", "sharded_state", "layered"),
    )
)
"""Load formats that read files of the model's folder, and nothing else."""
NOT_COUNTED: Final = (
    *("*.md", "*.txt", "LICENSE*", "*.png", "*.jpg", "*.jpeg", "*.gif", "*.jinja"),
    *("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "chat_template*"),
    "generation_config.json",
)
"""Files that only make text of tokens or are for people."""


@dataclass(frozen=True)
class Files:
    """A ``weights.WeightFiles`` of a folder or of one file."""

    root: Path

    def files(self) -> dict[str, Path]:
        """See ``weights.WeightFiles``."""
        if self.root.is_file():
            return {"": self.root}
        return {
            name: file
            for name, file in files_below(self.root).items()
            if not any(fnmatch(file.name, pattern) for pattern in NOT_COUNTED)
        }


def sources(arguments: Any, settings: Any, model_id: str) -> tuple[Source, ...]:
    """The weights of the model, its drafter and the adapters of ``--lora-paths``. ``arguments``:
    SGLang's ``ServerArgs``. ``settings`` gives the resolved value of a setting.

    ``model_id`` is the user's name for all of them. If there is one, no file is inspected. Raises
    ``Indescribable`` for weights that cannot be found without the network.
    """
    if model_id:
        return (f"id:{model_id}",)
    if reason := next(_elsewhere(arguments, settings), ""):
        raise Indescribable(f"{reason}: {NAME_IT}")
    found: list[Source] = [
        *_of(arguments.model_path, settings("revision"), settings("load_format"))
    ]
    if draft := settings("speculative_draft_model_path"):
        load_format = settings("speculative_draft_load_format") or settings("load_format")
        found += _of(draft, settings("speculative_draft_model_revision"), load_format)
    for adapter in settings("lora_paths") or ():
        found.append(Files(_folder(str(_adapter_path(adapter)), None)))
    if str(settings("load_format")) == "dummy":
        found.append(f"seed {settings('random_seed')}")
    return tuple(found)


def _elsewhere(arguments: Any, settings: Any) -> Iterator[str]:
    """Why weights may come from elsewhere than from the model's folder."""
    for name in ("custom_weight_loader", "model_loader_extra_config", "modelexpress_config"):
        if settings(name) not in (None, "", "{}", {}, []):
            yield f"{name} is given"
    if settings("checkpoint_engine_wait_weights_before_ready"):
        yield "the weights come from a checkpoint engine"
    if settings("weight_cache_mode") not in (None, "", "off", "none", "disabled"):
        yield "weight_cache_mode is given"
    if os.environ.get("SGLANG_USE_MODELSCOPE", "").lower() in ("1", "true", "yes"):
        yield "the weights come from ModelScope"


def _of(path: Any, revision: Any, load_format: Any) -> Iterator[Source]:
    name = str(getattr(load_format, "value", load_format) or "auto")
    if name not in KNOWN_FORMATS | {"dummy"}:
        raise Indescribable(f"what load format {name} reads is not known: {NAME_IT}")
    root = _folder(str(path), revision)
    if name != "dummy":
        yield Files(root)
    else:  # drawn from the seed
        config = root / "config.json"
        yield Files(config if config.is_file() else root)


def _adapter_path(adapter: Any) -> Any:
    """The path of an adapter: a ``LoRARef``, a mapping, or text like ``NAME=PATH``."""
    if isinstance(adapter, str):
        return adapter.rpartition("=")[2]
    return adapter["lora_path"] if isinstance(adapter, dict) else adapter.lora_path


def _folder(name: str, revision: str | None) -> Path:
    return Hub(None, weights.started_ns()).folder(name, revision)
