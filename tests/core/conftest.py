"""The rig that most tests of the core use."""

from __future__ import annotations

import pytest

from tests.core.rig import Rig


@pytest.fixture
def rig() -> Rig:
    return Rig()
