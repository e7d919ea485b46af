"""``.ci/run`` sees nothing that an earlier run left outside of the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
USED = (
    *("XDG_CONFIG_HOME", "HF_HOME", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR"),
    *("TRITON_CACHE_DIR", "KVASS"),
)
# In the place of make: tells what it sees, and leaves something everywhere.
MAKE = """#!/bin/bash
echo "$1: $TMPDIR $(ls -A "$HOME") $(find "$TMPDIR" "$XDG_CACHE_HOME" -mindepth 1 -printf '%f ')"
for name in $USED; do echo "$name: ${!name-none}"; done
echo "pip: $PIP_CACHE_DIR $PIP_CONFIG_FILE $PIP_FIND_LINKS"
touch "$TMPDIR/left" "$HOME/left" "$XDG_CACHE_HOME/left"
[[ $1 == docs ]] || echo "==== 3 passed in 1.00s ===="
exit "$(cat "$1.status")"
"""


def ci(folder: Path, docs: int = 0, test: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a copy of it in ``folder`` with these statuses of ``make``."""
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci")
    home, programs = folder / "home", folder / "bin"
    for before in (".config/pip", ".cache/vllm"):
        (home / before).mkdir(parents=True)
    (home / ".config/pip/pip.conf").touch()
    (folder / ".cache/models/tiny").mkdir(parents=True)
    programs.mkdir()
    (programs / "make").write_text(MAKE)
    (programs / "make").chmod(0o755)
    (folder / "docs.status").write_text(str(docs))
    (folder / "test.status").write_text(str(test))
    environment = dict.fromkeys(USED, f"{home}/.config")
    environment |= {"HOME": str(home), "PATH": f"{programs}:{os.environ['PATH']}"}
    environment |= {"TMPDIR": str(folder), "USED": " ".join(USED), "PIP_FIND_LINKS": "/wheels"}
    return subprocess.run(
        ["bash", ".ci/run"], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_all_that_outlives_a_run_is_new_and_removed_but_what_pip_has(tmp_path: Path) -> None:
    done = ci(tmp_path)
    assert done.returncode == 0, done.stderr
    docs, *lines, summary, result = done.stdout.splitlines()
    temporary = docs.split()[1]
    assert docs == f"docs: {temporary} .cache "
    assert {f"{name}: none" for name in USED} <= set(lines)
    home = tmp_path / "home"
    assert f"pip: {home}/.cache/pip {home}/.config/pip/pip.conf /wheels" in lines
    assert not Path(temporary).parent.exists()
    assert len(temporary) < len("/tmp/12345678/t"), "paths of sockets are short"
    assert not (tmp_path / ".cache/models").exists()
    assert (summary, result) == ("---- summary", "==== 3 passed in 1.00s ====")


@pytest.mark.parametrize(("docs", "test", "status"), [(2, 0, 2), (0, 1, 1), (2, 1, 1)])
def test_what_fails_is_its_status(tmp_path: Path, docs: int, test: int, status: int) -> None:
    assert ci(tmp_path, docs, test).returncode == status
