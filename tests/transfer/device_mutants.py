"""Breaks of the GPU mover, made by hand (``breaks.txt``); the fake GPU must notice each."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from tests.support.mutants import Mutant, break_package, parse

MUTANTS: Final = parse(Path(__file__).with_name("breaks.txt").read_text())


def notice(mutant: Mutant, seeds: int = 400) -> str:
    """The first seed that fails, and how; empty if none does. Breaks this process."""
    break_package(mutant, "kvass.transfer")
    from tests.transfer.gpu_world import run_seed  # imports the mover

    logging.disable()
    return next(filter(None, map(run_seed, range(seeds))), "")
