"""The files from which vLLM loads a model's weights.

``kvass.engine.weights`` names the weights by the content of these files.

Laws of this file:

- It never uses the network.
- Weights that vLLM reads from a place that cannot be inspected have no name. Their address is no
  name, because other weights may be there tomorrow.

A file of vLLM's version (see ``adapt.py``).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from vllm import envs

from kvass.connectors.vllm import making
from kvass.engine.identity import Indescribable
from kvass.engine.model_files import Hub, files_below, unknown_weights
from kvass.engine.weights import NAME_IT, Source

SAFETENSORS_FIRST: Final = frozenset(
    ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "runai_streamer")
)
KNOWN_FORMATS: Final = SAFETENSORS_FIRST | {"pt"}
"""Load formats for which it is known which files vLLM reads."""
ANY_FILE_FORMATS: Final = frozenset(("gguf", "runai_streamer_sharded", "sharded_state"))
"""Load formats that may read any file of the folder.

With any other format the weights have no name. ``ipc_cache``, ``modelexpress`` and ``tensorizer``
read them from elsewhere. ``npcache`` reads a copy in the folder ``np`` that may be old. The formats
of plug-ins read them from unknown places."""
LOADER_MODULE: Final = "vllm.model_executor.model_loader"

WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt")
SMALL_FILES: Final = ("*config.json", "*quant*.json", "*.safetensors.index.json", "*.py")
MISTRAL_FILES: Final = ("params.json", "tekken.json")
COUNTED: Final = (*WEIGHTS, *SMALL_FILES, *MISTRAL_FILES)
"""Files of a model's folder that change KV: weights, settings of their quantization and of the
preprocessing of images, the index of weight files, the model's own code, and configurations.

The model's configuration is also a field of the namespace, but without some attributes
(``namespace.SKIPPED_HF_ATTRIBUTES``)."""
NOT_COUNTED: Final = ("*tokenizer_config.json",)
"""Tokenizers do not count, because requests are token ids. Mistral's ``tekken.json`` does count: it
also has the settings for the preprocessing of images."""
TOKENIZER: Final = ("*token*.json", "vocab*", "merges.txt", "*.model", "*.tiktoken", "*.py")
"""Files of a tokenizer. They count only for some models (DeepSeek-V4.1's engrams)."""
NOT_COUNTED_FOLDERS: Final = ("original", "metal", "onnx", "openvino")
"""Folders with the same weights for other programs."""
NOT_COUNTED_WITH_SAFETENSORS: Final = (
    "pytorch_model*.bin",
    "training_args.bin",
    "optimizer.*",
    "scheduler.pt",
)
"""Files that vLLM does not read if the folder has safetensors files."""

INNER_MODELS: Final = {"audio_model_id": "audio_config", "text_model_id": "wrapped_model_config"}
"""Attributes of a model's configuration that name another model whose weights are a part of it
(Ultravox). Each is mapped to the attribute with that model's configuration."""


@dataclass(frozen=True)
class LocalFiles:
    """A ``weights.WeightFiles`` of files that match ``patterns`` and hold no weights."""

    root: Path
    patterns: tuple[str, ...]

    def files(self) -> dict[str, Path]:
        """See ``weights.WeightFiles``."""
        found = files_below(self.root)
        return {name: file for name, file in found.items() if _matches(name, self.patterns)}


@dataclass(frozen=True)
class LocalWeights:
    """A ``weights.WeightFiles`` of a folder or of one file, with vLLM's ``load_format``."""

    root: Path
    load_format: str

    def files(self) -> dict[str, Path]:
        """See ``weights.WeightFiles``."""
        if self.root.is_file():
            return {"": self.root}
        found = files_below(self.root)
        if self.load_format in ANY_FILE_FORMATS:
            return found
        only_safetensors = self.load_format in SAFETENSORS_FIRST and any(
            fnmatch(name, "*.safetensors") and "/" not in name for name in found
        )
        not_counted = (*NOT_COUNTED, *(NOT_COUNTED_WITH_SAFETENSORS if only_safetensors else ()))
        counting = {
            name: file
            for name, file in found.items()
            if _matches(name, COUNTED)
            and not _matches(name, not_counted)
            and not name.startswith(tuple(f"{folder}/" for folder in NOT_COUNTED_FOLDERS))
        }
        return counting if any(_matches(name, WEIGHTS) for name in counting) else {}


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def sources(vllm_config: Any, model_id: str) -> tuple[Source, ...]:
    """The weights of the model and of its drafter. Layers of both are in the same KV cache.

    ``model_id`` is the user's name for all of these weights. If there is one, no file is inspected.
    Raises ``Indescribable`` for weights that cannot be found without the network.
    """
    if model_id:
        return (f"id:{model_id}",)
    load, speculative = vllm_config.load_config, vllm_config.speculative_config
    since_ns = making.since_ns(vllm_config)
    found = [*_sources_of(vllm_config.model_config, load, since_ns)]
    if speculative is not None and speculative.draft_model_config is not None:
        load = speculative.draft_load_config or load
        found += _sources_of(speculative.draft_model_config, load, since_ns)
    return tuple(dict.fromkeys(found))


def _sources_of(model: Any, load: Any, since_ns: int) -> Iterator[Source]:
    load_format = str(load.load_format)
    if load_format == "dummy":
        yield "dummy"  # their seed is a field of the namespace
        return
    if load_format not in KNOWN_FORMATS | ANY_FILE_FORMATS or _is_replaced(load_format):
        raise Indescribable(f"what load format {load_format} reads is not known: {NAME_IT}")
    if "://" in model.model_weights:
        raise Indescribable(
            f"what lies at {model.model_weights} is not known, only its address: {NAME_IT}"
        )
    if model.model_weights and not os.path.exists(model.model_weights):
        raise unknown_weights(model.model_weights)  # ``model.revision`` belongs to ``model.model``
    hub = _hub(load.download_dir, since_ns)
    folder = hub.folder(model.model, model.revision, model.hf_config)
    yield LocalWeights(folder, load_format)
    if model.model_weights:
        yield LocalWeights(Path(os.path.abspath(model.model_weights)), load_format)
    if load.download_dir and not os.path.exists(model.model):  # only weights are fetched into it
        yield f"configuration {getattr(model.hf_config, '_commit_hash', None)}"
    for name, configuration in INNER_MODELS.items():
        if inner := getattr(model.hf_config, name, None):
            inner_config = getattr(model.hf_config, configuration, None)
            yield LocalWeights(hub.folder(inner, None, inner_config), load_format)
    yield from _other_files(model, folder, since_ns)


def _hub(folder: str | None, since_ns: int) -> Hub:
    return Hub(folder, since_ns, used=not envs.VLLM_USE_MODELSCOPE)


def _is_replaced(load_format: str) -> bool:
    """Whether a plug-in has replaced vLLM's own loader of this format."""
    loaders = getattr(sys.modules.get(LOADER_MODULE), "_LOAD_FORMAT_TO_MODEL_LOADER", {})
    loader = loaders.get(load_format)
    return (
        load_format in KNOWN_FORMATS
        and getattr(loader, "__module__", "vllm").split(".")[0] != "vllm"
    )


# ---------------------------------------------------------------- files beside the weights


def _other_files(model: Any, folder: Path, since_ns: int) -> Iterator[Source]:
    """Files that change KV and may be outside of the model's folder."""
    hub = _hub(None, since_ns)
    if path := model.hf_config_path:
        revision = getattr(model, "_hf_config_revision", None) or model.revision
        yield LocalFiles(hub.folder(path, revision, model.hf_config), SMALL_FILES)
    if getattr(model.hf_text_config, "engram_layer_ids", None):  # similar texts are equal to it
        yield LocalFiles(hub.folder(model.tokenizer, model.revision, model.hf_config), TOKENIZER)
    for repo in sorted({*_code_elsewhere(model, folder)}):
        if hub.has(repo):  # else nothing was loaded from there
            yield LocalFiles(hub.folder(repo, model.code_revision, None), ("*.py",))


def _code_elsewhere(model: Any, folder: Path) -> Iterator[str]:
    """The repositories with code that computes the model or preprocesses its images. The model's
    own repository is among them only if its code is taken from another revision."""
    computes = "Transformers" in str(model.architecture) or model.multimodal_config is not None
    if not (model.trust_remote_code and computes):
        return
    if model.code_revision:
        yield model.model
    found = dict(getattr(model.hf_config, "auto_map", None) or {})
    for file in folder.glob("*processor_config.json"):
        with suppress(OSError, ValueError):  # a file that vLLM cannot read either
            found |= json.loads(file.read_bytes()).get("auto_map", {})
    for kind, reference in found.items():
        repo, elsewhere, _ = str(reference).partition("--")
        if kind != "AutoTokenizer" and elsewhere and repo != model.model:
            yield repo
