"""The one place that knows the version."""

from typing import Final

__version__: Final = "0.1.0"
