"""The one place that knows versions: ours, and vLLM's that the connector was tested with."""

from typing import Final

__version__: Final = "0.1.0"

TESTED_VLLM: Final = frozenset({"0.30.0", "0.31.0", "0.32.0", "0.33.0"})
