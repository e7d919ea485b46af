"""Which weights an engine computes with: a name by content, equal wherever the content is equal.

Laws of this file:

- A name says what the engine has loaded, or there is none. Files are looked at after the engine has
  read them. So files that changed since this process started, or change while they are read here,
  have no name.
- Every process of an engine comes to the same name by itself. Where the files lie, when they were
  written and what else lies beside them does not count.
- The network is asked nothing, and the engine's threads read no weight file.

The name has the SHA-256 of each file in it, because the Hugging Face Hub names large files by that:
what its client has noted need not be computed. A file of vLLM's version (see ``adapt.py``): it
knows what vLLM's loaders read.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name
from vllm import envs

from kvass.connectors.vllm import contents, identity
from kvass.connectors.vllm.identity import Indescribable

READY_S: Final = 2.0
"""How long the start of an engine waits for a name. Of many gigabytes it comes later."""
NICE: Final = 10
"""By how much the thread that hashes gives way to the engine's."""

SAFETENSORS_FIRST: Final = frozenset(
    ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "runai_streamer")
)
ON_DISK: Final = SAFETENSORS_FIRST | {"pt", "npcache"}
"""Load formats of which we know what is read. Of those we do not know every file counts."""
ELSEWHERE: Final = frozenset(("ipc_cache", "modelexpress", "tensorizer"))
"""Load formats that read their weights from another place than the model's."""

WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt")
SMALL: Final = ("*quant*.json", "*processor_config.json", "*.safetensors.index.json", "*.py")
CONFIGURATIONS: Final = ("config.json", "params.json", "generation_config.json")
READ: Final = (*WEIGHTS, *SMALL, *CONFIGURATIONS)
"""Weights, how they are quantized, how images are prepared, which weight files are read, a model's
own code, and its configuration: a field of the identity has that too, but not all of it (see
``settings.SET_BY_MODELS``). Tokenizers do not count: what comes in are token ids."""
UNREAD_FOLDERS: Final = ("original", "metal", "onnx", "openvino")
"""The same weights once more, for other programs."""
UNREAD_BESIDE: Final = ("pytorch_model*.bin", "training_args.bin", "optimizer.*", "scheduler.pt")
"""What is not read of a folder with safetensors files."""

NAME_IT: Final = "set kvass.model_id to a name of your own for these weights"
COMMIT: Final = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True)
class Local:
    """Weights in a folder, or in one file. ``load_format`` is vLLM's."""

    root: Path
    load_format: str

    def files(self) -> dict[str, Path]:
        """The files that count, by name relative to the root, in a fixed order. Raises OSError."""
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
        return {name: file for name, file in found.items() if _counts(name, first)}


def _counts(name: str, safetensors: bool) -> bool:
    """``safetensors``: the loader prefers them, and there are some."""
    folder, nested, _ = name.partition("/")
    unread = UNREAD_BESIDE if safetensors else ()
    if (nested and folder in UNREAD_FOLDERS) or any(fnmatch(name, one) for one in unread):
        return False
    return any(fnmatch(name, one) for one in READ)


Source = str | Local
"""The weights of one model: their name, if it is known at once, or where they lie."""


# ---------------------------------------------------------------- where weights are


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
        return ["dummy"]  # the seed is in the loader's field
    if load_format in ELSEWHERE:
        raise Indescribable(f"load format {load_format} reads weights from elsewhere: {NAME_IT}")
    if "://" in model.model_weights:  # the model is a folder of small files, fetched at each start
        return [identity.canonical(["store", model.model_weights, model.revision])]
    names = [model.model, *filter(None, [model.model_weights])]
    return [Local(_path(name, model, load), load_format) for name in names]


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
    return commit if ours or changed_ns <= contents.started_ns() else None


# ---------------------------------------------------------------- naming


def begin(found: tuple[Source, ...]) -> Future[str]:
    """Name these weights, on a thread that reads what must be read.

    The result is the name, or ``Indescribable`` with the reason. Cancel it to end the thread. Its
    callbacks run on another thread, of normal priority: threads that they start inherit it.
    """
    name: Future[str] = Future()
    threading.Thread(target=_run, args=(name, found), name="kvass-weights", daemon=True).start()
    return name


def wait(name: Future[str]) -> None:
    """Give ``name`` a moment, for an engine that starts. Raises ``Indescribable`` if there is none;
    it may still not be known, or turn out later not to exist."""
    with suppress(TimeoutError):
        name.result(READY_S)


def _run(name: Future[str], found: tuple[Source, ...]) -> None:
    hashed: Future[str] = Future()
    args = hashed, found, name.cancelled
    threading.Thread(target=_hash, args=args, name="kvass-hashing", daemon=True).start()
    try:
        named = hashed.result()
    except contents.Stopped:
        return
    except Exception as error:  # noqa: BLE001 - whatever it is, who waits must hear of it
        _settle(name.set_exception, error)
    else:
        _settle(name.set_result, named)


def _hash(hashed: Future[str], found: tuple[Source, ...], stopped: Callable[[], bool]) -> None:
    with suppress(OSError):  # on Linux this is the thread's own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    try:
        hashed.set_result(name_of(found, stopped))
    except Exception as error:  # noqa: BLE001 - ``_run`` says what becomes of it
        hashed.set_exception(error)


def _settle(set_: Callable[[Any], None], value: Any) -> None:
    with suppress(InvalidStateError):  # cancelled: nobody wants to know any more
        set_(value)


def name_of(found: tuple[Source, ...], stopped: Callable[[], bool] = lambda: False) -> str:
    """The name of these weights. Raises ``Indescribable``, and ``contents.Stopped`` if so."""
    try:
        return identity.canonical(
            [one if isinstance(one, str) else _content(one, stopped) for one in found]
        )
    except OSError as error:
        raise Indescribable(f"the weight files cannot be read: {error}") from error


def _content(weights: Local, stopped: Callable[[], bool]) -> str:
    """The digest of the files' names and contents."""
    files = weights.files()
    known = WEIGHTS if weights.load_format in ON_DISK and "" not in files else ("*",)
    if not any(fnmatch(name, one) for name in files for one in known):
        raise Indescribable(f"no weight files are in {weights.root}: {NAME_IT}")
    seen = _unchanged(weights, files)
    parts = []
    for name, file in files.items():
        digest = contents.noted(weights.root, name, file) or contents.sha256(file, stopped)
        parts += [name, digest]
    if _unchanged(weights, weights.files()) != seen:
        raise _changed(weights)
    return "sha256:" + identity.digest(parts)


def _unchanged(weights: Local, files: dict[str, Path]) -> contents.Seen:
    seen = contents.look(weights.root, files)
    if seen.changed_ns > contents.started_ns():
        raise _changed(weights)
    return seen


def _changed(weights: Local) -> Indescribable:
    return Indescribable(
        f"the weight files in {weights.root} changed since this engine started, so it may have "
        "loaded others: restart the engine"
    )
