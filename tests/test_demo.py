"""The demo's verdict: it must be able to fail. (That it succeeds is shown by running it.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.demo import Row, report, verdict
from examples.demo_upgrade import upgrade
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


def test_what_was_a_hit_before_an_upgrade_is_one_after_it(
    tmp_path: Path, memory_folder: Path
) -> None:
    """The control: a daemon whose memory ends with it."""
    seen = upgrade(tmp_path, str(memory_folder), 0.3)
    assert (seen.before, seen.after) == (1.0, 1.0)
    assert seen.pages
    assert upgrade(tmp_path, "", 0.3).after == 0.0
