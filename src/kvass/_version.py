"""The one place that knows versions: ours, and those of engines that were tested."""

import re
from typing import Final

__version__: Final = "0.1.0"

TESTED_VLLM: Final = frozenset({"0.30.0", "0.31.0", "0.32.0", "0.33.0"})
TESTED_SGLANG: Final = frozenset({"0.5.20", "0.5.21", "0.5.22", "0.5.23"})

WHEEL: Final = re.compile(r"(^|\.)(cpu|cu\d+|rocm[\d.]*|xpu|tpu|empty)(?=\.|$)")
"""What vLLM's own builds add to its version: the kind of device."""


def code_version(version: str) -> str:
    """vLLM's version. What a build of somebody else adds to it is kept: its code may differ."""
    release, _, local = version.partition("+")
    local = WHEEL.sub("", local).strip(".")
    return f"{release}+{local}" if local else release
