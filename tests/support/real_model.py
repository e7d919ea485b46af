"""The pretrained model that ``make setup`` brings (``requirements/model.sh``), and its chats.

It is SmolLM2-135M-Instruct: 30 layers, 3 KV heads of 64, a context of 8,192 tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

FOLDER: Final = Path(sys.prefix) / "smollm2"
END: Final = "<|im_end|>"


def real_model() -> Path | None:
    """Its folder; None where the package was not to be had."""
    return FOLDER if (FOLDER / ".made-from").is_file() else None


def needed() -> Path:
    """Its folder. A test that needs it fails where there is none."""
    folder = real_model()
    assert folder is not None, "no pretrained model: bash requirements/model.sh .venv says why"
    return folder


class Words:
    """Texts as its tokens, and back."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def tokens(self, text: str) -> list[int]:
        """The tokens of ``text``, with none before or after them."""
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def text(self, tokens: Sequence[int]) -> str:
        """The text of an answer, up to its end."""
        found: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return found.split(END)[0].strip()


def chat(system: str, *turns: str) -> str:
    """The prompt of a chat, as the model's template makes it. ``turns`` are the user's and the
    assistant's in turn; what comes next is an answer."""
    text = f"<|im_start|>system\n{system}{END}\n"
    for number, turn in enumerate(turns):
        text += f"<|im_start|>{('user', 'assistant')[number % 2]}\n{turn}{END}\n"
    return text + "<|im_start|>assistant\n"
