"""Where the files of a model are: below a folder, or in the cache of the Hugging Face Hub's client.

Laws of this file:

- It never uses the network.
- A repository's folder is that of the commit that the engine has loaded. Where that is not known,
  it has none.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Final

from kvass.engine.identity import Indescribable
from kvass.engine.weights import NAME_IT

COMMIT: Final = re.compile("[0-9a-f]{40}")


def files_below(root: Path) -> dict[str, Path]:
    """All files below ``root`` except hidden ones, by relative name."""
    found = {}
    for file in sorted(root.rglob("*")):
        inner = file.relative_to(root)
        hidden = any(part.startswith(".") or part == "__pycache__" for part in inner.parts)
        if not hidden and file.is_file():
            found[str(inner)] = file
    return found


class Hub:
    """The local cache of the Hugging Face Hub, in ``folder`` or where its client has it.
    ``since_ns``: when the engine began (``weights.started_ns``). ``used``: False if the engine
    fetches models from elsewhere."""

    def __init__(self, folder: str | None, since_ns: int, used: bool = True) -> None:
        from huggingface_hub import constants

        self._cache = Path(folder or constants.HF_HUB_CACHE).absolute()
        self._since_ns, self._used = since_ns, used

    def has(self, name: str) -> bool:
        """Whether ``name`` is an existing path or a repository with files in the cache."""
        return os.path.exists(name) or self._repo(name).exists()

    def folder(self, name: str, revision: Any, configuration: Any = None) -> Path:
        """The folder or file of ``name``: the path itself, or the snapshot of a repository.

        ``revision``: None, a text, or what has the commit to which the engine ``resolved`` it.
        ``configuration``: that which was loaded from it, if any. Raises ``Indescribable``.
        """
        if os.path.exists(name):
            return Path(os.path.abspath(name))
        if not self._used:
            raise unknown_weights(name)
        commit = self._commit(self._repo(name), revision, configuration)
        if commit is None:
            raise Indescribable(
                f"which commit of {name} was loaded is not known: restart the engine, give a "
                f"commit as the revision, or {NAME_IT}"
            )
        if not (snapshot := self._repo(name) / "snapshots" / commit).is_dir():
            raise Indescribable(f"the weights of {name} are not in {self._cache}: {NAME_IT}")
        return snapshot

    def _repo(self, name: str) -> Path:
        from huggingface_hub.file_download import repo_folder_name

        return self._cache / repo_folder_name(repo_id=name, repo_type="model")

    def _commit(self, repo: Path, revision: Any, configuration: Any) -> str | None:
        """The commit that the engine loaded, or None if it is not known.

        It is the commit to which the engine resolved the revision, or the revision itself, or the
        commit in the cache's note. A note counts if it agrees with the configuration or is older
        than the engine.
        """
        if (resolved := getattr(revision, "resolved", None)) is not None:
            return str(resolved)
        if revision is not None and COMMIT.fullmatch(revision):
            return str(revision)
        note = repo / "refs" / (revision or "main")
        try:
            commit, changed_ns = note.read_text().strip(), note.stat().st_ctime_ns
        except OSError:
            return None
        agrees = commit == getattr(configuration, "_commit_hash", None)
        return commit if agrees or changed_ns <= self._since_ns else None


def unknown_weights(name: str) -> Indescribable:
    return Indescribable(f"which weights of {name} were loaded is not known: {NAME_IT}")
