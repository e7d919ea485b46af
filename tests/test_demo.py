"""The demo's verdict: it must be able to fail. (That it succeeds is shown by running it.)"""

from __future__ import annotations

from pathlib import Path

import jinja2
import pytest

from examples import demo_questions
from examples.demo import ENGINE, Row, introduced, report, rows_of, told, verdict
from examples.demo_questions import NEW_TOKENS, Questions
from examples.demo_upgrade import upgrade
from tests.support import real_model
from tests.support.vllm.process import Answer


def answer(external: int, tokens: tuple[int, ...] = (5, 6)) -> Answer:
    return Answer(list(tokens), [-1.0, -1.0], 0, external, 0.5 if external else 2.0, 3.0)


def rows(second: Answer, third: Answer) -> list[Row]:
    cold = answer(0)
    return [
        Row("A", [1] * 4200, cold, cold),
        Row("B same", [1] * 4200, second, cold),
        Row("B shared", [1] * 4200, third, cold),
    ]


def test_hits_with_the_same_tokens_pass(capsys: pytest.CaptureFixture[str]) -> None:
    good = rows(answer(4096), answer(3072))
    report(good)
    assert verdict(good) == 0
    shown = capsys.readouterr().out
    assert "same tokens: yes" in shown
    assert "4.0x" in shown


@pytest.mark.parametrize(
    "bad",
    [
        rows(answer(0), answer(3072)),
        rows(answer(4096), answer(0)),
        rows(answer(4096, (5, 7)), answer(3072)),
        rows(answer(4096), answer(3072, (7, 6))),
    ],
    ids=["no hit", "no shared hit", "another token", "another token after the shared prefix"],
)
def test_a_miss_or_another_token_fails(bad: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict(bad) == 1
    assert "same tokens: yes" not in capsys.readouterr().out


def test_without_the_pretrained_model_it_asks_random_tokens_and_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(real_model, "FOLDER", tmp_path / "none")
    monkeypatch.setattr(demo_questions, "build", lambda folder, shape: folder)
    asked = introduced()
    one, other = asked.prompts
    assert one[: asked.shared] == other[: asked.shared]
    assert one[asked.shared] != other[asked.shared]
    answers = (answer(0), answer(4192), answer(3296), answer(0), answer(0))
    assert told(asked, rows_of(asked, (17, 18), answers)) == 0
    shown = capsys.readouterr().out
    assert "no pretrained model: random weights and random tokens\n" in shown
    assert [row.who for row in rows_of(asked, (17, 18), answers)][::4] == [
        "A 17 computes",
        "B 18 uncached, question 2",
    ]


def test_the_pretrained_model_is_asked_two_questions_about_one_text_that_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    real_model.needed()
    asked = introduced()
    one, other = asked.prompts
    assert asked.shared >= 3500
    assert max(len(one), len(other)) - asked.shared < 32, "the text comes before the question"
    assert max(len(one), len(other)) + NEW_TOKENS <= ENGINE["max_model_len"]
    assert told(asked, answered(asked)) == 0
    shown = capsys.readouterr().out
    assert f"{asked.asked[1]}\n  It is a cache.\n" in shown


def test_a_chat_is_what_the_models_template_makes() -> None:
    template = (real_model.needed() / "chat_template.jinja").read_text()
    turns = [("system", "S"), ("user", "Q"), ("assistant", "A"), ("user", "Q 2")]
    messages = [{"role": role, "content": content} for role, content in turns]
    made = jinja2.Template(template).render(messages=messages, add_generation_prompt=True)
    assert real_model.chat(*(content for _, content in turns)) == made


def answered(asked: Questions) -> list[Row]:
    """As if all prompts had the same answer, which ends before the tokens do."""
    tokens = real_model.Words(asked.model).tokens(f"It is a cache.{real_model.END} And")
    answers = [answer(external, tuple(tokens)) for external in (0, 4096, 4096, 0, 0)]
    return rows_of(asked, (17, 18), tuple(answers))


def test_what_was_a_hit_before_an_upgrade_is_one_after_it(
    tmp_path: Path, memory_folder: Path
) -> None:
    """The control: a daemon whose memory ends with it."""
    seen = upgrade(tmp_path, str(memory_folder), 0.3)
    assert (seen.before, seen.after) == (1.0, 1.0)
    assert seen.pages
    assert upgrade(tmp_path, "", 0.3).after == 0.0
