"""Which files vLLM's loaders read their weights from. ``kvass.engine.weights`` names them.

The network is asked nothing. A file of vLLM's version (see ``adapt.py``).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name
from vllm import envs

from kvass.engine import identity, weights
from kvass.engine.identity import Indescribable
from kvass.engine.weights import NAME_IT, Source

SAFETENSORS_FIRST: Final = frozenset(
    ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "runai_streamer")
)
ON_DISK: Final = SAFETENSORS_FIRST | {"pt", "npcache"}
"""Load formats whose files are known. For any other, every file in the folder counts."""
ELSEWHERE: Final = frozenset(("ipc_cache", "modelexpress", "tensorizer"))
"""Load formats that read their weights from another place than the model's."""

WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt")
SMALL: Final = ("*quant*.json", "*processor_config.json", "*.safetensors.index.json", "*.py")
CONFIGURATIONS: Final = ("config.json", "params.json", "generation_config.json")
READ: Final = (*WEIGHTS, *SMALL, *CONFIGURATIONS)
"""Weights, how they are quantized, how images are prepared, which weight files are read, a model's
own code, and its configuration: a field of the identity has that too, but not all of it (see
``namespace.NOT_THE_MODELS``). Tokenizers do not count: requests are token ids."""
UNREAD_FOLDERS: Final = ("original", "metal", "onnx", "openvino")
"""The same weights once more, for other programs."""
UNREAD_BESIDE: Final = ("pytorch_model*.bin", "training_args.bin", "optimizer.*", "scheduler.pt")
"""What is not read of a folder with safetensors files."""

COMMIT: Final = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True)
class LocalWeights:
    """Weights in a folder, or in one file: ``weights.WeightFiles``. ``load_format`` is vLLM's."""

    root: Path
    load_format: str

    def files(self) -> dict[str, Path]:
        """See ``weights.WeightFiles``."""
        if self.root.is_file():
            return {"": self.root}
        found = {}
        for file in sorted(self.root.rglob("*")):
            inner = file.relative_to(self.root)
            hidden = any(part.startswith(".") or part == "__pycache__" for part in inner.parts)
            if not hidden and file.is_file():
                found[str(inner)] = file
        if self.load_format not in ON_DISK:
            return found
        first = self.load_format in SAFETENSORS_FIRST and any(
            fnmatch(name, "*.safetensors") and "/" not in name for name in found
        )
        unread = UNREAD_BESIDE if first else ()
        counting = {
            name: file
            for name, file in found.items()
            if _matches(name, READ)
            and not _matches(name, unread)
            and not name.startswith(tuple(f"{folder}/" for folder in UNREAD_FOLDERS))
        }
        return counting if any(_matches(name, WEIGHTS) for name in counting) else {}


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
    found = _sources_of(vllm_config.model_config, load)
    if speculative is not None and speculative.draft_model_config is not None:
        load = speculative.draft_load_config or load
        found += _sources_of(speculative.draft_model_config, load)
    return tuple(dict.fromkeys(found))


def _sources_of(model: Any, load: Any) -> list[Source]:
    load_format = str(load.load_format)
    if load_format == "dummy":
        return ["dummy"]  # the seed is a field of the identity
    if load_format in ELSEWHERE:
        raise Indescribable(f"load format {load_format} reads weights from elsewhere: {NAME_IT}")
    if "://" in model.model_weights:  # the model is a folder of small files, fetched at each start
        return [identity.canonical(["store", model.model_weights, model.revision])]
    names = [model.model, *filter(None, [model.model_weights])]
    return [LocalWeights(_path(name, model, load), load_format) for name in names]


def _path(name: str, model: Any, load: Any) -> Path:
    """A path as it is; a name on the Hub as its snapshot in the Hub's cache."""
    if os.path.exists(name):
        return Path(os.path.abspath(name))
    if envs.VLLM_USE_MODELSCOPE or name != model.model:  # the revision is of ``model.model``
        raise Indescribable(f"which weights of {name} were loaded is not known: {NAME_IT}")
    cache = Path(load.download_dir or constants.HF_HUB_CACHE).absolute()
    repo = cache / repo_folder_name(repo_id=name, repo_type="model")
    commit = _commit(repo, model)
    if commit is None:
        raise Indescribable(
            f"which commit of {name} was loaded is not known: give a commit as the revision, "
            f"or {NAME_IT}"
        )
    if not (snapshot := repo / "snapshots" / commit).is_dir():
        raise Indescribable(f"the weights of {name} are not in {cache}: {NAME_IT}")
    return snapshot


def _commit(repo: Path, model: Any) -> str | None:
    """The commit that vLLM loaded: as it resolved it, or as the Hub's cache notes it."""
    revision = model.revision
    if (resolved := getattr(revision, "resolved", None)) is not None:
        return str(resolved)
    if revision is not None and COMMIT.fullmatch(revision):
        return str(revision)
    note = repo / "refs" / (revision or "main")
    try:
        commit, changed_ns = note.read_text().strip(), note.stat().st_ctime_ns
    except OSError:
        return None
    ours = commit == getattr(model.hf_config, "_commit_hash", None)
    return commit if ours or changed_ns <= weights.started_ns() else None
