"""Engines of two versions of vLLM on one daemon: each is warm from its own rows, no others.

``make test`` brings the oldest version and ``make test-versions`` the others, in the folder that
``VLLM_OVERLAYS`` names.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from kvass.testing.daemon import running_daemon
from tests.engine.conftest import Starter, store
from tests.support.vllm.fake_vllm import installed, version_of
from tests.support.vllm.judge import Judge
from tests.support.vllm.models import TINY
from tests.support.vllm.process import Prompt

FOLDER: Final = Path(os.environ.get("VLLM_OVERLAYS", "nowhere")).absolute()
OTHERS: Final = sorted(file.parents[1] for file in FOLDER.glob("*/vllm/_C.abi3.so"))
RUN: Final = (
    "import sys, pytest, vllm._version as v; "
    "print(v.version, flush=True); sys.exit(pytest.main(sys.argv[1:]))"
)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.skipif(not OTHERS, reason="make test-all and make test-versions run it")
@pytest.mark.parametrize("overlay", OTHERS, ids=lambda path: path.name)
def test_engines_of_two_versions_share_nothing(
    overlay: Path, start: Starter, tmp_path: Path
) -> None:
    versions = [version_of(installed()), version_of(overlay / "vllm")]
    assert versions[0] != versions[1] == overlay.name
    path = os.pathsep.join([str(overlay), os.environ["PYTHONPATH"]])
    tokens = random.Random(overlay.name).choices(range(4, TINY.vocab), k=700)
    with running_daemon(tmp_path, lookup_budget_ms=10_000) as daemon:
        socket = Path(daemon.socket)
        own = start(f"own beside {overlay.name}", socket=socket)
        environment = {"PYTHONPATH": path, "VLLM_TARGET_DEVICE": "cpu"}
        other = start(overlay.name, socket=socket, environment=environment)
        cold = [store(own.wait_ready(), tokens, 8)]
        rows = daemon.wait_until(reservations=0)["rows"]
        cold += other.wait_ready().store(Prompt(tokens, 8))
        assert [answer.cached for answer in cold] == [0, 0]
        assert daemon.status()["rows"] == 2 * rows
        assert len(daemon.status()["namespaces"]) == 2
        for engine in (own, other):
            assert engine.reset()
            warm = engine.one(tokens, 8)
            assert (warm.local, warm.external) == (0, 672)  # its last whole block
            Judge(engine).check(tokens, warm)


@pytest.mark.skipif(not OTHERS, reason="make test and make test-versions run it")
def test_the_schedulers_of_the_oldest_version() -> None:
    """A part of the tests that ``make test-versions`` runs with every version."""
    files = [Path(__file__).with_name(f"test_scheduler_{name}.py") for name in ("load", "store")]
    path = os.pathsep.join([str(OTHERS[0]), os.environ["PYTHONPATH"]])
    environment = {**os.environ, "PYTHONPATH": path, "VLLM_TARGET_DEVICE": "cpu"}
    command = [sys.executable, "-c", RUN, "-q", "-p", "no:cacheprovider", *map(str, files)]
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
    assert ran.stdout.startswith(OTHERS[0].name), "it tested another version"
    assert " passed" in ran.stdout
