"""Which differences between loaded and computed values are as large as the values themselves."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvass.engine.comparer import MOST, difference

Values = npt.NDArray[np.float32]


def bytes_of(values: Values, dtype: str) -> npt.NDArray[np.uint8]:
    """The bytes of values in ``dtype``; bfloat16 is the upper half of a float32."""
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.astype(dtype).view(np.uint8)


def values() -> Values:
    """A row like those of a real model: most values are about 1, some channels about 30."""
    rng = np.random.default_rng(7)
    usual = np.where(np.arange(4096) % 64 == 9, 30, 1)
    drawn: Values = (rng.normal(size=(4, 4096)) * usual).astype(np.float32)
    return drawn


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_a_flipped_bit_of_an_exponent_is_wrong_and_rounding_is_not(dtype: str) -> None:
    computed = values()
    noise = np.random.default_rng(8).normal(size=computed.shape) * (np.abs(computed) + 1) * 0.02
    loaded = (computed + noise).astype("f4")
    rounded = difference(bytes_of(loaded, dtype), bytes_of(computed, dtype), dtype)
    assert rounded.largest[0] > 1, "the control: the largest difference alone says little"
    assert rounded.wrong is None
    at = int(np.argmin(np.abs(computed[2] - 3)))
    loaded[2, at] = computed[2, at] / 256
    found = difference(bytes_of(loaded, dtype), bytes_of(computed, dtype), dtype)
    assert found.largest == rounded.largest, "hidden by rounding of larger values"
    assert found.wrong == pytest.approx((3, 3), rel=0.02)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_is_wrong(value: float) -> None:
    computed = values()
    loaded = computed.copy()
    loaded[1, 5] = value
    found = difference(bytes_of(loaded, "float32"), bytes_of(computed, "float32"), "float32")
    assert found.wrong is not None
    assert found.wrong[0] == MOST
    back = difference(bytes_of(computed, "float32"), bytes_of(loaded, "float32"), "float32")
    assert back.wrong == (MOST, MOST)
    same = difference(bytes_of(loaded, "float32"), bytes_of(loaded, "float32"), "float32")
    assert same == ((0.0, same.largest[1]), None)


def test_another_row_is_wrong_and_bytes_are_never() -> None:
    computed = values()
    other = computed[:, ::-1].copy()
    assert difference(bytes_of(other, "float32"), bytes_of(computed, "float32"), "float32").wrong
    raw = bytes_of(other, "float32"), bytes_of(computed, "float32")
    assert difference(*raw, "float8_e4m3fn").wrong is None
