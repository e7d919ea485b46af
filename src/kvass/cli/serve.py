"""``kvass serve``."""

from __future__ import annotations

import logging
import os

from kvass.config import Parser, add_flags, load, to_yaml


def run(argv: list[str]) -> int:
    """Serve until told to stop, or print the configuration. Raises ``ConfigError``."""
    parser = Parser(prog="kvass serve", description="Run the daemon until SIGTERM or SIGINT.")
    add_flags(parser)
    parser.add_argument("--config", metavar="FILE", help="YAML file of these options")
    parser.add_argument("--print-config", action="store_true", help="print as YAML, and leave")
    options = vars(parser.parse_args(argv))
    file, only_print = options.pop("config"), options.pop("print_config")
    config = load(options, os.environ, file)
    if only_print:
        print(to_yaml(config), end="")
        return 0
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    from kvass.daemon.main import serve

    serve(config, lambda line: print(line, flush=True))
    return 0
