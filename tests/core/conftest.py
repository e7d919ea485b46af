"""Hypothesis for the mutation run: a failure is enough, no need to make it small."""

from hypothesis import Phase, settings

settings.register_profile("once", phases=[Phase.explicit, Phase.generate], database=None)
