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

TESTED: Final = ", ".join(sorted(TESTED_VLLM))


class Served(Enum):
    """How a version of vLLM is served.

    ``ON_TRIAL``: the version was never tested, but has everything that the connector relies on.
    ``REFUSED``: the version was never tested and lacks something that the connector relies on. No
    hook of the connector may run.
    """

    TESTED = "tested"
    ON_TRIAL = "on trial"
    REFUSED = "refused"


@dataclass(frozen=True)
class Verdict:
    """The decision for one version of vLLM.

    ``caches``: whether its engines use the cache. ``message``: if they do, a line for the log, else
    the reason why not. The message is empty for a tested version.
    """

    served: Served
    caches: bool
    message: str = ""


def judge(version: str, differences: Sequence[str], allow_untested: bool = False) -> Verdict:
    """The decision for ``version``, which has the form that ``code_version`` returns.

    ``differences``: what ``contract.differences`` found; it matters for an untested version only.
    ``allow_untested``: whether the operator set ``kvass.untested_vllm``.
    """
    if version in TESTED_VLLM:
        return Verdict(Served.TESTED, True)
    text = f"vLLM {version} was never tested (tested: {TESTED})"
    if differences:
        more = (
            f" and {len(differences) - 3} more; kvass doctor shows all" if differences[3:] else ""
        )
        text += f", and it differs where kvass relies on it: {'; '.join(differences[:3])}{more}"
        return Verdict(Served.REFUSED, False, text)
    text += "; it has all that kvass relies on"
    if allow_untested:
        return Verdict(Served.ON_TRIAL, True, f"{text}, and kvass.untested_vllm is set: caching")
    return Verdict(Served.ON_TRIAL, False, f"{text}: to try it, set kvass.untested_vllm")


def verdict_on(package: Path, version: str, allow_untested: bool = False) -> Verdict:
    """The decision for the vLLM whose Python package is the folder ``package``.

    Its sources are read only if ``version`` was never tested.
    """
    code = code_version(version)
    differences = () if code in TESTED_VLLM else _differences(package, code)
    return judge(code, differences, allow_untested)


@cache
def _differences(package: Path, version: str) -> Sequence[str]:
    return contract.differences(package, version)
