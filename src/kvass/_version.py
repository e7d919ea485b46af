"""The one place that knows versions: ours, and vLLM's that the connector was tested with."""

from typing import Final

__version__: Final = "0.1.0"

TESTED_VLLM: Final = frozenset({"0.32.0"})
