"""Which files vLLM's loaders read their weights from. ``kvass.engine.weights`` names them.

Laws of this file:

- The network is asked nothing.
- What is read from a place that cannot be looked at has no name: not even its address, where
  others may lie tomorrow.

A file of vLLM's version (see ``adapt.py``).
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name
from vllm import envs

from kvass.engine import weights
from kvass.engine.identity import Indescribable
from kvass.engine.weights import NAME_IT, Source

SAFETENSORS_FIRST: Final = frozenset(
    ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "runai_streamer")
)
KNOWN: Final = SAFETENSORS_FIRST | {"pt"}
"""Load formats whose files are known."""
ANY_FILE: Final = frozenset(("gguf", "runai_streamer_sharded", "sharded_state"))
"""Load formats that may read any file of the folder. All others have no name: they read weights
from elsewhere (``ipc_cache``, ``modelexpress``, ``tensorizer``), from an old copy (``npcache``: a
folder ``np`` that vLLM does not renew), or a plug-in says from where."""
LOADERS: Final = "vllm.model_executor.model_loader"

WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt")
SMALL: Final = ("*config.json", "*quant*.json", "*.safetensors.index.json", "*.py")
OF_MISTRAL: Final = ("params.json", "tekken.json")
READ: Final = (*WEIGHTS, *SMALL, *OF_MISTRAL)
"""Weights, how they are quantized, how images are prepared, which weight files are read, a model's
own code, and its parts' configurations: a field of the identity has the model's, but not all of it
(see ``namespace.NOT_THE_MODELS``)."""
UNREAD: Final = ("*tokenizer_config.json",)
"""Tokenizers do not count: requests are token ids. Mistral's also says how images are prepared."""
TOKENIZER: Final = ("*token*.json", "vocab*", "merges.txt", "*.model", "*.tiktoken", "*.py")
"""But some models look up by a token's text what they compute (``_reads_text``)."""
UNREAD_FOLDERS: Final = ("original", "metal", "onnx", "openvino")
"""The same weights once more, for other programs."""
UNREAD_BESIDE: Final = ("pytorch_model*.bin", "training_args.bin", "optimizer.*", "scheduler.pt")
"""What is not read of a folder with safetensors files."""

SECOND: Final = {"audio_model_id": "audio_config", "text_model_id": "wrapped_model_config"}
"""Where a model's configuration names a model whose weights are a part of it (Ultravox), and the
configuration that came with those."""
COMMIT: Final = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True)
class LocalFiles:
    """Files of a folder that are no weights: ``weights.WeightFiles``."""

    root: Path
    patterns: tuple[str, ...]

    def files(self) -> dict[str, Path]:
        """See ``weights.WeightFiles``."""
        found = _files(self.root)
        return {name: file for name, file in found.items() if _matches(name, self.patterns)}


@dataclass(frozen=True)
class LocalWeights:
    """Weights in a folder, or in one file: ``weights.WeightFiles``. ``load_format`` is vLLM's."""

    root: Path
    load_format: str

    def files(self) -> dict[str, Path]:
        """See ``weights.WeightFiles``."""
        if self.root.is_file():
            return {"": self.root}
        found = _files(self.root)
        if self.load_format in ANY_FILE:
            return found
        first = self.load_format in SAFETENSORS_FIRST and any(
            fnmatch(name, "*.safetensors") and "/" not in name for name in found
        )
        unread = (*UNREAD, *(UNREAD_BESIDE if first else ()))
        counting = {
            name: file
            for name, file in found.items()
            if _matches(name, READ)
            and not _matches(name, unread)
            and not name.startswith(tuple(f"{folder}/" for folder in UNREAD_FOLDERS))
        }
        return counting if any(_matches(name, WEIGHTS) for name in counting) else {}


def _files(root: Path) -> dict[str, Path]:
    """All files below ``root`` but hidden ones, by relative name."""
    found = {}
    for file in sorted(root.rglob("*")):
        inner = file.relative_to(root)
        hidden = any(part.startswith(".") or part == "__pycache__" for part in inner.parts)
        if not hidden and file.is_file():
            found[str(inner)] = file
    return found


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def sources(vllm_config: Any, model_id: str) -> tuple[Source, ...]:
    """The weights of the model, and of its drafter, whose layers share the KV cache.

    ``model_id`` is the user's name for all of them; then nothing is looked at. Raises
    ``Indescribable`` for weights that cannot be found without asking the network.
    """
    if model_id:
        return (f"id:{model_id}",)
    load, speculative = vllm_config.load_config, vllm_config.speculative_config
    found = [*_sources_of(vllm_config.model_config, load)]
    if speculative is not None and speculative.draft_model_config is not None:
        load = speculative.draft_load_config or load
        found += _sources_of(speculative.draft_model_config, load)
    return tuple(dict.fromkeys(found))


def _sources_of(model: Any, load: Any) -> Iterator[Source]:
    load_format = str(load.load_format)
    if load_format == "dummy":
        yield "dummy"  # the seed is a field of the identity
        return
    if load_format not in KNOWN | ANY_FILE or _is_replaced(load_format):
        raise Indescribable(f"what load format {load_format} reads is not known: {NAME_IT}")
    if "://" in model.model_weights:
        raise Indescribable(
            f"what lies at {model.model_weights} is not known, only its address: {NAME_IT}"
        )
    if model.model_weights and not os.path.exists(model.model_weights):
        raise _unknown(model.model_weights)  # the revision is that of ``model.model``
    hub = Hub(load.download_dir)
    folder = hub.folder(model.model, model.revision, model.hf_config)
    yield LocalWeights(folder, load_format)
    if model.model_weights:
        yield LocalWeights(_absolute(model.model_weights), load_format)
    if load.download_dir and not os.path.exists(model.model):  # only weights are fetched to there
        yield f"configuration {getattr(model.hf_config, '_commit_hash', None)}"
    for name, configuration in SECOND.items():
        if second := getattr(model.hf_config, name, None):
            own = getattr(model.hf_config, configuration, None)
            yield LocalWeights(hub.folder(second, None, own), load_format)
    yield from _other_files(model, folder)


def _is_replaced(load_format: str) -> bool:
    """Whether a plug-in loads in place of vLLM's own loader."""
    loaders = getattr(sys.modules.get(LOADERS), "_LOAD_FORMAT_TO_MODEL_LOADER", {})
    loader = loaders.get(load_format)
    return load_format in KNOWN and getattr(loader, "__module__", "vllm").split(".")[0] != "vllm"


# ---------------------------------------------------------------- files beside the weights


def _other_files(model: Any, folder: Path) -> Iterator[Source]:
    """What changes KV and need not be in the model's folder."""
    hub = Hub(None)
    if path := model.hf_config_path:
        revision = getattr(model, "_hf_config_revision", None) or model.revision
        yield LocalFiles(hub.folder(path, revision, model.hf_config), SMALL)
    if _reads_text(model):
        yield LocalFiles(hub.folder(model.tokenizer, model.revision, model.hf_config), TOKENIZER)
    for repo in sorted({*_code_elsewhere(model, folder)}):
        if hub.has(repo):  # or nothing was loaded from there
            yield LocalFiles(hub.folder(repo, model.code_revision, None), ("*.py",))


def _reads_text(model: Any) -> bool:
    """Whether the model takes tokens with a similar text for the same (DeepSeek-V4.1's engrams)."""
    return bool(getattr(model.hf_text_config, "engram_layer_ids", None))


def _code_elsewhere(model: Any, folder: Path) -> Iterator[str]:
    """The repositories from which code is run that computes the model, or prepares its images: not
    the model's own, unless at another revision."""
    computes = "Transformers" in str(model.architecture) or model.multimodal_config is not None
    if not (model.trust_remote_code and computes):
        return
    if model.code_revision:
        yield model.model
    found = dict(getattr(model.hf_config, "auto_map", None) or {})
    for file in folder.glob("*processor_config.json"):
        with suppress(OSError, ValueError):  # then vLLM cannot read it either
            found |= json.loads(file.read_bytes()).get("auto_map", {})
    for kind, reference in found.items():
        repo, elsewhere, _ = str(reference).partition("--")
        if kind != "AutoTokenizer" and elsewhere and repo != model.model:
            yield repo


# ---------------------------------------------------------------- the Hub's cache


def _unknown(name: str) -> Indescribable:
    return Indescribable(f"which weights of {name} were loaded is not known: {NAME_IT}")


def _absolute(path: str) -> Path:
    return Path(os.path.abspath(path))


class Hub:
    """The Hub's cache: of its client, or in another folder."""

    def __init__(self, folder: str | None) -> None:
        self._cache = Path(folder or constants.HF_HUB_CACHE).absolute()

    def has(self, name: str) -> bool:
        """Whether ``name`` is a path, or anything of it was fetched."""
        return os.path.exists(name) or self._repo(name).exists()

    def folder(self, name: str, revision: str | None, configuration: Any) -> Path:
        """A path as it is; a name on the Hub as its snapshot. ``configuration``: the one that was
        loaded from there, if any. Raises ``Indescribable``."""
        if os.path.exists(name):
            return _absolute(name)
        if envs.VLLM_USE_MODELSCOPE:
            raise _unknown(name)
        commit = self._commit(self._repo(name), revision, configuration)
        if commit is None:
            raise Indescribable(
                f"which commit of {name} was loaded is not known: give a commit as the revision, "
                f"or {NAME_IT}"
            )
        if not (snapshot := self._repo(name) / "snapshots" / commit).is_dir():
            raise Indescribable(f"the weights of {name} are not in {self._cache}: {NAME_IT}")
        return snapshot

    def _repo(self, name: str) -> Path:
        return self._cache / repo_folder_name(repo_id=name, repo_type="model")

    def _commit(self, repo: Path, revision: Any, configuration: Any) -> str | None:
        """The commit that vLLM loaded: as it resolved it, or as the cache notes it."""
        if (resolved := getattr(revision, "resolved", None)) is not None:
            return str(resolved)
        if revision is not None and COMMIT.fullmatch(revision):
            return str(revision)
        note = repo / "refs" / (revision or "main")
        try:
            commit, changed_ns = note.read_text().strip(), note.stat().st_ctime_ns
        except OSError:
            return None
        ours = commit == getattr(configuration, "_commit_hash", None)
        return commit if ours or changed_ns <= weights.started_ns() else None
