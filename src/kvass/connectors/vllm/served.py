"""How a version of vLLM is served. It is decided here and nowhere else.

Nothing of vLLM is imported: ``kvass doctor`` asks without torch, and the connector before it uses
anything of vLLM.
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
    """``ON_TRIAL``: it was never tested, and has all that the connector relies on. ``REFUSED``: it
    differs there, so that nothing of the connector may run."""

    TESTED = "tested"
    ON_TRIAL = "on trial"
    REFUSED = "refused"


@dataclass(frozen=True)
class Verdict:
    """``caches``: whether an engine of this vLLM uses the cache. ``said``: a line for its log, or
    the reason why it does not; empty for what was tested."""

    served: Served
    caches: bool
    said: str = ""


def judge(version: str, differs: Sequence[str], tried: bool = False) -> Verdict:
    """``version``: as ``code_version`` says it. ``differs``: what the contract finds in it, if it
    was never tested. ``tried``: the operator set ``kvass.untested_vllm``."""
    if version in TESTED_VLLM:
        return Verdict(Served.TESTED, True)
    said = f"vLLM {version} was never tested (tested: {TESTED})"
    if differs:
        more = f" and {len(differs) - 3} more; kvass doctor shows all" if differs[3:] else ""
        said += f", and it differs where kvass relies on it: {'; '.join(differs[:3])}{more}"
        return Verdict(Served.REFUSED, False, said)
    said += "; it has all that kvass relies on"
    if tried:
        return Verdict(Served.ON_TRIAL, True, f"{said}, and kvass.untested_vllm is set: caching")
    return Verdict(Served.ON_TRIAL, False, f"{said}: to try it, set kvass.untested_vllm")


def verdict_on(package: Path, version: str, tried: bool = False) -> Verdict:
    """On the vLLM whose Python package is the folder ``package``. Its sources are read only if
    ``version`` was never tested."""
    code = code_version(version)
    return judge(code, () if code in TESTED_VLLM else _differences(package, code), tried)


@cache
def _differences(package: Path, version: str) -> list[str]:
    return contract.differences(package, version)
