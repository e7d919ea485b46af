"""Hypothesis for every test here: time fails none, and each run draws the same examples.

A busy machine is slow at times, which is no fault of the code; and what is red once is red again.
``--hypothesis-profile=explore`` draws other examples each time.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("explore"), derandomize=True, database=None)
settings.load_profile("same")
