"""A vLLM engine of a soak whose model has Gemma 3's groups: two of sliding windows, one full.

Windows are stored where prompts end and where they part (decision 056). A row has 128 KiB, so
``compress`` takes it.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Final

import msgspec

from tests.support.soak import vllm_engine
from tests.support.soak.engine import Setup
from tests.support.vllm.hybrid_models import gemma3

MODEL: Final = gemma3()
write_answers = partial(vllm_engine.write_answers, model=MODEL, name="gemma3-answers.json")


if __name__ == "__main__":
    vllm_engine.play(msgspec.json.decode(sys.argv[1], type=Setup), MODEL)
