"""For every test here: chance and a busy machine fail none, so what is red once is red again.

Hypothesis has no deadlines and draws the same examples in each run
(``--hypothesis-profile=explore`` draws others). The collector looks at nothing that collecting the
tests has imported: with vLLM among it, one look took 0.25 s, as long as a call may take an engine.
"""

from __future__ import annotations

import gc

from hypothesis import HealthCheck, settings

settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("explore"), derandomize=True, database=None)
settings.load_profile("same")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
