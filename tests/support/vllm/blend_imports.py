"""Prints which modules of blending there are after the import of the connector without it, and of
that with it. To be run where nothing of kvass was imported."""

from __future__ import annotations

import importlib
import sys

if __name__ == "__main__":
    for module in ("entry", "blend_connector"):
        importlib.import_module(f"kvass.connectors.vllm.{module}")
        print([name for name in sys.modules if name.startswith("kvass.") and "blend" in name])  # noqa: T201
