"""``kvass blend add``: computes and stores documents, ahead of the prompts that contain them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvass.connectors.transformers.connector import connect
from kvass.errors import ConfigError, Unavailable
from kvass.wire.framing import one_line

PATIENCE_S = 5.0
"""How long to wait for the daemon."""


_UNLOADABLE: Final = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ImportError,
    RuntimeError,
    AssertionError,
    SafetensorError,
)
"""What files, options, absent packages and devices that torch was not built for lead to."""


def load(path: str, loading: Mapping[str, Any]) -> tuple[Any, Any]:
    """The tokenizer and the model at ``path``. ``loading``: for ``from_pretrained``, and
    ``device``, by default the CPU. Raises ``ConfigError`` if they cannot be loaded."""
    options = {"device": "cpu", **loading}
    device = options.pop("device")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, **options).eval().to(device)
    except _UNLOADABLE as error:
        raise ConfigError(f"--model {path}: {one_line(' '.join(str(error).split()))}") from None
    return tokenizer, model


def add(
    path: str, loading: Mapping[str, Any], texts: Mapping[str, str], salt: str, **terms: Any
) -> Iterator[tuple[str, int, int]]:
    """Load the model and the tokenizer at ``path`` and store ``texts``, by name. Yields of each its
    name, how many of its tokens can be found, and how many it has.

    ``loading``: as of ``load``; ``terms``: for ``connect``. Raises ``ConfigError`` for a
    model that cannot be loaded, ``Unavailable`` if there is no daemon.
    """
    tokenizer, model = load(path, loading)
    with connect(model, blend="none", **terms) as cached:
        for name, text in texts.items():
            if not cached.wait_connected(PATIENCE_S):
                raise Unavailable("the daemon cannot be reached")
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
            yield name, cached.add(ids.to(model.device), salt=salt), ids.shape[1]
