"""The decision whether engines of a vLLM version use the cache. It is made here and nowhere else.

This module imports nothing of vLLM. So ``kvass doctor`` can use it without torch, and the connector
can use it before anything of vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Final

from kvass._version import TESTED_VLLM, code_version
from kvass.connectors.vllm import contract
from kvass.engine.setup import Verification

TESTED: Final = ", ".join(sorted(TESTED_VLLM))
TRIAL: Final = Verification(trial_every=100, trial_loads=1000)
"""How copies are verified with a version that was never tested."""


class Served(Enum):
    """How a version of vLLM is served.

    ``ON_TRIAL``: the version was never tested, but has everything that the connector relies on. Its
    engines use the cache, and more copies are verified. ``REFUSED``: the version was never tested
    and lacks something that the connector relies on. No hook of the connector may run.
    """

    TESTED = "tested"
    ON_TRIAL = "on trial"
    REFUSED = "refused"


@dataclass(frozen=True)
class Verdict:
    """The decision for one version of vLLM.

    ``message``: if its engines use the cache, a line for the log, else the reason why not. It is
    empty for a tested version.
    """

    served: Served
    message: str = ""

    @property
    def caches(self) -> bool:
        """Whether its engines use the cache."""
        return self.served is not Served.REFUSED

    @property
    def verification(self) -> Verification:
        """How copies are verified, if the operator sets nothing."""
        return TRIAL if self.served is Served.ON_TRIAL else Verification()


def judge(version: str, differences: Sequence[str]) -> Verdict:
    """The decision for ``version``, which has the form that ``code_version`` returns.

    ``differences``: what ``contract.differences`` found; it matters for an untested version only.
    """
    if version in TESTED_VLLM:
        return Verdict(Served.TESTED)
    text = f"vLLM {version} was never tested (tested: {TESTED})"
    if differences:
        more = (
            f" and {len(differences) - 3} more; kvass doctor shows all" if differences[3:] else ""
        )
        text += f", and it differs where kvass relies on it: {'; '.join(differences[:3])}{more}"
        return Verdict(Served.REFUSED, text)
    text += (
        "; it has all that kvass relies on, so it is served. After the first copies, those of one "
        f"in {TRIAL.trial_every} jobs are verified until {TRIAL.trial_loads} loads were right"
    )
    return Verdict(Served.ON_TRIAL, text)


def verdict_on(package: Path, version: str) -> Verdict:
    """The decision for the vLLM in the folder ``package``. Its sources are read only if ``version``
    was never tested."""
    code = code_version(version)
    differences = () if code in TESTED_VLLM else _differences(package, code)
    return judge(code, differences)


def loads_in_step(package: Path, version: str) -> bool:
    """Whether the vLLM in the folder ``package`` has what loads inside a step need."""
    code = code_version(version)
    return code in TESTED_VLLM or not contract.differences(package, code, optional=True)


@cache
def _differences(package: Path, version: str) -> Sequence[str]:
    return contract.differences(package, version)
