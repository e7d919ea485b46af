"""Engines of two versions of vLLM on one daemon: each is warm from its own rows, no others.

``make test-versions`` brings the other versions, in the folder that ``KVASS_OVERLAYS`` names.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Final

import pytest

from kvass.testing.daemon import running_daemon
from tests.engine.conftest import LIKE_COLD, Starter, store
from tests.support.vllm.fake_vllm import installed, version_of
from tests.support.vllm.models import TINY

FOLDER: Final = Path(os.environ.get("KVASS_OVERLAYS", "nowhere")).absolute()
OTHERS: Final = sorted(file.parents[1] for file in FOLDER.glob("*/vllm/_C.abi3.so"))


@pytest.mark.engine
@pytest.mark.skipif(not OTHERS, reason="make test-versions runs it")
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
        other = start(overlay.name, socket=socket, environment={"PYTHONPATH": path})
        cold = [store(own.wait_ready(), tokens, 8)]
        rows = daemon.wait_until(reservations=0)["rows"]
        cold.append(other.wait_ready().one(tokens, 8))
        assert [answer.cached for answer in cold] == [0, 0]
        assert daemon.wait_until(reservations=0)["rows"] == 2 * rows
        assert len(daemon.status()["namespaces"]) == 2
        for engine, before in zip((own, other), cold, strict=True):
            assert engine.reset()
            warm = engine.one(tokens, 8)
            assert (warm.local, warm.external) == (0, 672)  # its last whole block
            assert warm.tokens == before.tokens
            assert warm.logprobs == pytest.approx(before.logprobs, abs=LIKE_COLD)
