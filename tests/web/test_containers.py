"""The container of a process, from what ``/proc`` says of several container engines' processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvass.web.containers import container_of

ID = "0123456789ab" + "c" * 52
OTHER = "f" * 64


@pytest.mark.parametrize(
    ("cgroup", "container"),
    [
        (f"0::/system.slice/docker-{ID}.scope\n", ID[:12]),
        (f"0::/../../docker/{ID}\n", ID[:12]),
        (f"0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{ID}.scope\n", ID[:12]),
        (f"12:cpu:/docker/{OTHER}/docker/{ID}\n", ID[:12]),
        ("0::/user.slice/user-1000.slice/session-2.scope\n", ""),
        (f"0::/system.slice/{ID[:40]}.service\n", ""),
        ("", ""),
    ],
)
def test_it_is_the_innermost_one(tmp_path: Path, cgroup: str, container: str) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cgroup").write_text(cgroup)
    assert container_of(7, tmp_path) == container


def test_a_process_that_is_not_seen_has_none(tmp_path: Path) -> None:
    assert container_of(0) == container_of(os.getpid(), tmp_path) == ""
