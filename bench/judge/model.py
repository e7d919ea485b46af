"""The models of the contenders: ``bench.engine``'s, with a tokenizer that all benchmarks can use;
and a pretrained one, where words matter.

A word of the vocabulary is a token, with the space before it, and so is each character of any
other word. So random words have as many tokens as they are, and English text, as AIPerf's, has
other tokens in other places.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as Bytes
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from bench.engine import MODELS, SHAPE
from kvass.errors import Unavailable
from tests.support.real_model import real_model
from tests.support.vllm.models import build

RANDOM: Final = "200 million random weights"
PRETRAINED: Final = "SmolLM2-135M-Instruct, pretrained"

SPECIAL: Final = ("<pad>", "<s>", "</s>", "<unk>")
SPACE: Final = "Ġ"
"""A space, as this kind of tokenizer writes it; ``Ċ`` is a new line."""
CHARACTERS: Final = (*map(chr, range(33, 127)), SPACE, "Ċ")
WORDS: Final = ("hi", "help", "tell", "warmup")
"""What ``lmcache bench engine`` fills its texts with."""
LETTERS: Final = str.maketrans("0123456789", "abcdefghij")
TEMPLATE: Final = (
    "{% if salt is defined %}{{ salt }} {% endif %}"
    "{% for message in messages %}{{ message['content'] }} {% endfor %}"
)
"""``salt``: what a request wants in front of its messages, so that no other text begins so."""
CONFIG: Final = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    **dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True)),
    "clean_up_tokenization_spaces": False,
    "chat_template": TEMPLATE,
}


def model(name: str, folder: Path) -> Path:
    """A link, or links to the saved weights. Raises ``Unavailable``."""
    whole = folder / ("pretrained" if name == PRETRAINED else "model")
    if whole.exists():
        return whole
    if name == PRETRAINED:
        if (real := real_model()) is None:
            raise Unavailable("no pretrained model: make setup says why")
        whole.symlink_to(real)
        return whole
    whole.mkdir()
    for file in build(MODELS, SHAPE).iterdir():
        (whole / file.name).symlink_to(file)
    tokenizer().save(str(whole / "tokenizer.json"))
    (whole / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    return whole


def tokenizer() -> Tokenizer:
    """As many tokens as the model has. ``long-doc-permutator`` wants words of letters alone."""
    tokens = [*SPECIAL, *CHARACTERS, *(SPACE + word for word in WORDS)]
    more = range(len(tokens), SHAPE.vocab)
    tokens += [f"{SPACE}w{str(number).translate(LETTERS)}" for number in more]
    table = {token: number for number, token in enumerate(tokens)}
    whole = Tokenizer(BPE(table, [], unk_token="<unk>", ignore_merges=True))
    whole.pre_tokenizer = ByteLevel(add_prefix_space=True)
    whole.decoder = Bytes()
    whole.add_special_tokens(list(SPECIAL))
    return whole
