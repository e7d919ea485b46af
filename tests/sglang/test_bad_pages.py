"""Pages that the daemon cannot hold: one line in the log, and the engine runs uncached."""

from __future__ import annotations

import logging

import pytest

from tests.sglang.conftest import Backends
from tests.sglang.test_storage import KEYS
from tests.support.sglang import fake


def test_a_page_that_does_not_fit_is_one_line_and_no_cache(
    backends: Backends, caplog: pytest.LogCaptureFixture
) -> None:
    pool = fake.HostPool([70 << 20], pages=2)
    with caplog.at_level(logging.WARNING, "kvass"):
        backend = backends.make(pool)
        indices = pool.indices([0])
        assert not any(backend.batch_set_v1(KEYS[:1], indices, fake.ExtraInfo([])))
        assert backend.batch_exists(KEYS, fake.ExtraInfo([])) == 0
        assert not any(backend.batch_get_v1(KEYS[:1], indices, fake.ExtraInfo([])))
    (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "give the daemon an L1 above" in line.getMessage()
    assert line.exc_info is None
