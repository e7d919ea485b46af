"""``kvass serve``."""

from __future__ import annotations

import logging
import os
from typing import Any

from kvass.config import load, to_yaml


def run(options: dict[str, Any]) -> int:
    """Serve until told to stop, or print the configuration. Raises ``ConfigError``."""
    file, only_print = options.pop("config"), options.pop("print_config")
    config = load(options, os.environ, file)
    if only_print:
        print(to_yaml(config), end="")
        return 0
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    from kvass.daemon.main import serve

    serve(config, lambda line: print(line, flush=True))
    return 0
