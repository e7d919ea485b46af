"""Which tokens are computed when segments stand in a prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvass.blend.plan import (
    BadSegment,
    FirstK,
    KvDev,
    PlacedSegment,
    Prompt,
    all_tokens,
    none,
    plan,
)
from kvass.errors import UsageError


@st.composite
def prompts(draw: Any) -> Prompt:
    """Gaps and segments in turns; some adjoin, and some of those continue what stands before."""
    prefix = draw(st.integers(0, 9))
    last = draw(st.sampled_from([b"", b"p"])) if prefix else b""
    end, before, segments = prefix, last, []
    for index in range(draw(st.integers(0, 5))):
        end += draw(st.sampled_from([0, 0, 1, 7]))
        length = draw(st.integers(1, 12))
        stored = draw(st.sampled_from([before, b"", b"other"]))
        mine = draw(st.sampled_from([bytes([index]), b""]))
        segments.append(PlacedSegment(end, draw(st.integers(0, 99)), length, stored, mine))
        end, before = end + length, mine
    tokens = max(1, end + draw(st.integers(0, 4)))
    return Prompt(tokens, prefix, tuple(segments), last)


def sure(prompt: Prompt) -> set[int]:
    """What every plan computes, token by token."""
    cached = set(range(prompt.prefix))
    for s in prompt.segments:
        cached |= {s.new_start + i for i in range(s.length)}
    return set(range(prompt.tokens)) - cached | {prompt.tokens - 1}


@given(prompts())
def test_what_no_segment_has_is_computed_and_the_last_token(prompt: Prompt) -> None:
    assert set(plan(prompt, none)) == sure(prompt)
    behind = set(range(prompt.prefix, prompt.tokens)) | {prompt.tokens - 1}
    assert plan(prompt, all_tokens).tolist() == sorted(behind)


@given(prompts(), st.integers(0, 15))
def test_first_k_computes_the_head_of_what_was_stored_after_something_else(
    prompt: Prompt, k: int
) -> None:
    expected = sure(prompt)
    for index, s in enumerate(prompt.segments):
        one = prompt.segments[index - 1] if index else None
        end, before = (one.new_end, one.last) if one else (prompt.prefix, prompt.prefix_last)
        at_the_start = end == 0 and s.new_start == 0 and s.predecessor == b""
        if not at_the_start and not (s.new_start == end and before and s.predecessor == before):
            expected |= set(range(s.new_start, s.new_end)[:k])
    assert plan(prompt, FirstK(k)).tolist() == sorted(expected)


@given(prompts(), st.floats(0, 1), st.randoms(use_true_random=False))
def test_kv_dev_computes_the_ratio_that_deviates_most(
    prompt: Prompt, ratio: float, random: Any
) -> None:
    deviation = np.array([random.choice([0.0, 1.0, 2.5, 7.0]) for _ in range(prompt.tokens)])
    inside = set(np.flatnonzero(prompt.in_segments()))
    chosen = set(plan(prompt, KvDev(ratio, lambda _: deviation))) - (sure(prompt) - inside)
    wanted = int(np.ceil(ratio * len(inside)))
    forced = inside & {prompt.tokens - 1}
    assert wanted <= len(chosen) <= wanted + len(forced)
    left = inside - chosen
    if left and chosen - forced:
        assert min(deviation[list(chosen - forced)]) >= max(deviation[list(left)])


def test_a_deviation_that_is_no_number_is_computed_first() -> None:
    prompt = Prompt(10, 0, (PlacedSegment(0, 50, 8),))
    deviation = np.array([5.0, 4, 3, np.nan, 2, 1, 0, 0, 9, 9])
    assert plan(prompt, KvDev(0.25, lambda _: deviation)).tolist() == [0, 3, 8, 9]


def test_ones_own_selector_chooses_within_segments_only() -> None:
    prompt = Prompt(20, 4, (PlacedSegment(6, 0, 5), PlacedSegment(11, 0, 5)))
    assert plan(prompt, lambda p: [0, 7, 7, 12]).tolist() == [4, 5, 7, 12, 16, 17, 18, 19]
    for outside in (-1, 20):
        with pytest.raises(UsageError, match=r"outside of \[0, 20\)"):
            plan(prompt, lambda p, at=outside: [at])


@pytest.mark.parametrize(
    ("segments", "index", "why"),
    [
        ([(2, 0, 4)], 0, "the exact prefix ends at 4"),
        ([(-1, 0, 4)], 0, "negative"),
        ([(4, -7, 4)], 0, "negative"),
        ([(4, 0, 0)], 0, "length is not above 0"),
        ([(4, 0, 4), (8, 0, -3)], 1, "length is not above 0"),
        ([(4, 0, 4), (7, 9, 2)], 1, "the segment before it ends at 8"),
        ([(10, 0, 4), (4, 9, 2)], 1, "unsorted"),
        ([(4, 0, 4), (16, 9, 5)], 1, "the prompt ends at 20"),
        ([(25, 0, 4)], 0, "the prompt ends at 20"),
    ],
)
def test_a_bad_segment_is_named(segments: Any, index: int, why: str) -> None:
    with pytest.raises(BadSegment, match=rf"segment {index} .*{why}") as caught:
        Prompt(20, 4, tuple(PlacedSegment(*s) for s in segments))
    assert caught.value.index == index


def test_other_mistakes_are_named() -> None:
    for tokens, prefix in ((0, 0), (4, 5), (4, -1)):
        with pytest.raises(UsageError, match="a prefix of"):
            Prompt(tokens, prefix, ())
    with pytest.raises(UsageError, match="first_k of -1"):
        FirstK(-1)
    with pytest.raises(UsageError, match=r"ratio of 1\.5"):
        KvDev(1.5, lambda _: [])
    with pytest.raises(UsageError, match=r"deviations \(3,\) of a prompt of 8"):
        plan(Prompt(8, 0, ()), KvDev(0.5, lambda _: [1, 2, 3]))
