"""Arguments of several commands: a size, a count, the geometry of a model."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from typing import Final

from kvass.config import Parser
from kvass.simulate.models import MODELS, Layers, layers_of
from kvass.types import Size

BLOCK_TOKENS: Final = 16
DEFAULT_MODEL: Final = "llama-3-8b"
_MOST_BYTES: Final = 1 << 60


def size(text: str) -> int:
    """Parse a size in bytes, at least 1."""
    try:
        parsed = Size.parse(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
    if not 0 < parsed <= _MOST_BYTES:
        raise ArgumentTypeError(f"{text} is not between 1 byte and {Size(_MOST_BYTES)}")
    return int(parsed)


def count(text: str) -> int:
    """Parse a number, at least 1."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0
    if not 0 < number <= 1 << 31:
        raise ArgumentTypeError(f"{text!r} is no number between 1 and {1 << 31}")
    return number


def add_model(parser: Parser) -> None:
    """Add the flags that ``model_layers`` reads to ``parser``."""
    names = ", ".join(MODELS)
    parser.add_argument(
        "--model", metavar="NAME", help=f"one of {names} (default: {DEFAULT_MODEL})"
    )
    parser.add_argument(
        "--token-bytes", type=count, metavar="N", help="bytes of KV of one token, for other models"
    )


def model_layers(options: Namespace) -> tuple[Layers, ...]:
    """The layers of the model that the flags name, by default those of ``DEFAULT_MODEL``. Raises
    ``UsageError`` for an unknown name."""
    known = layers_of(options.model or DEFAULT_MODEL)
    return (Layers(1, options.token_bytes),) if options.token_bytes else known
