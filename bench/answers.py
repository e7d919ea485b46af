"""``python -m bench.answers``: do answers stay in L1 where prompts repeat them, and only there?

Real vLLM engines with the pretrained model, one after the other, on this machine's CPU. Chats take
turns at random, in an L1 that lacks room for all of them, and vLLM's own cache is emptied before
each round. The first half of an answer plays the thinking. The template ``keeps`` has it in later
prompts, the template ``drops`` leaves it out. All texts are tokenised anew.

``on``, ``off``, ``auto``: ``kvass.generated``. Figures are hit tokens of all rounds, and of those
after the first two; ``repeated`` is what ``kvass status`` says.

With a smaller L1 (``--l1-mib 96``) most chats are gone before they go on. There answers cost more
hits than they bring, also where prompts repeat them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any, Final

from kvass.cli.bench.rig import PATIENCE_S, say, start_daemon
from kvass.client.client import Client
from kvass.errors import KvassError, Unavailable
from tests.support.real_model import Words, chat, real_model
from tests.support.vllm.process import EngineProcess, Prompt

CHATS: Final = 12
AT_ONCE: Final = 6
ROUNDS: Final = 7
ANSWER: Final = 32
"""Tokens of an answer; the first half is thinking."""
L1_MIB: Final = 160
"""Room for 7,300 tokens."""
MOST_TURNS: Final = 5
ARGS: Final[dict[str, Any]] = {
    "block_size": 32,
    "max_model_len": 2048,
    "max_num_batched_tokens": 2048,
    "num_gpu_blocks_override": 320,
}
SETTINGS: Final = ("on", "off", "auto")
WARM_UP: Final = 2
TEXT: Final = Path(__file__).parent.parent / "LICENSE"


class Talk:
    """A chat. ``keeps``: its prompts have the thinking of earlier turns."""

    def __init__(self, words: Words, number: int, keeps: bool) -> None:
        self._words, self._keeps, self._text = words, keeps, TEXT.read_text()
        self._number, self._begun, self._said = number, 0, list[str]()

    @property
    def prompt(self) -> list[int]:
        piece = self._text[311 * (7 * self._number + self._begun) % 9000 :]
        question = piece[60 * len(self._said) :][:240]
        system = f"Answer reader {self._number}, for the time {self._begun}. {piece[:400]}"
        return self._words.tokens(chat(system, *self._said, question))

    def answered(self, tokens: Sequence[int]) -> None:
        """Go on, or begin anew after ``MOST_TURNS``."""
        piece = self._text[311 * (7 * self._number + self._begun) % 9000 :]
        question = piece[60 * len(self._said) :][:240]
        said = tokens if self._keeps else tokens[ANSWER // 2 :]
        self._said += [question, self._words.text(said)]
        if len(self._said) >= 2 * MOST_TURNS:
            self._begun, self._said = self._begun + 1, []


def hits(folder: Path, option: str, keeps: bool, rounds: int, l1_mib: int) -> dict[str, Any]:
    """The figures of one engine. Raises ``KvassError``."""
    if (model := real_model()) is None:
        raise Unavailable("no pretrained model: bash requirements/model.sh .venv")
    words, random = Words(model), Random(1)
    options = {"kvass.generated": option, "kvass.chunk_tokens": 32, "kvass.skip_slow_loads": False}
    talks, found = [Talk(words, number, keeps) for number in range(CHATS)], list[int]()
    with start_daemon(l1_mib << 20) as daemon:
        log = folder / f"{option} {keeps}.log"
        engine = EngineProcess(
            model, log, socket=Path(daemon.socket), args=ARGS, options=options, patient=True
        )
        with closing(engine):
            for _ in range(rounds):
                if not engine.reset():
                    raise Unavailable("vLLM's own cache could not be emptied")
                now = random.sample(talks, AT_ONCE)
                answers = engine.store(*(Prompt(talk.prompt, ANSWER) for talk in now))
                found.append(sum(answer.external for answer in answers))
                for talk, answer in zip(now, answers, strict=True):
                    talk.answered(answer.tokens)
            with Client(daemon.socket) as client:
                (ns,) = client.status(PATIENCE_S)["namespaces"]
    repeated = ns["repeated_tokens"] / max(1, ns["answer_tokens"])
    return {"hit_tokens": sum(found), "later": sum(found[WARM_UP:]), "repeated": repeated}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.answers", description="Answers in L1.")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help="(%(default)s)")
    parser.add_argument("--l1-mib", type=int, default=L1_MIB, metavar="N", help="(%(default)s)")
    chosen = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="kvass-bench-") as folder:
            for keeps in (False, True):
                for setting in SETTINGS:
                    say(f"{setting}, a template that {'keeps' if keeps else 'drops'} thinking")
                    figures = hits(Path(folder), setting, keeps, chosen.rounds, chosen.l1_mib)
                    about = {"template": "keeps" if keeps else "drops", "generated": setting}
                    print(json.dumps(about | figures), flush=True)
    except KvassError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
