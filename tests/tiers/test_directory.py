"""The disk tier's index does what a dict does, whatever collides."""

from __future__ import annotations

import random

import pytest

from kvass.tiers.disk.fingerprints import Fingerprints


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("crowd", [1 << 60, 3000, 300])
def test_it_does_what_a_dict_does(seed: int, crowd: int) -> None:
    """``crowd``: how many fingerprints there are; of few, all in three tables and few homes."""
    rng = random.Random(seed)
    real, ours = dict[int, int](), Fingerprints()

    def any_key() -> int:
        if real and rng.random() < 0.5:
            return rng.choice(list(real))
        number = rng.randrange(crowd)
        return number + 1 if crowd > 3000 else 1 + number % 3 + (number % 17 << 8) + (number << 40)

    for _ in range(3000):
        key, value, what = any_key(), rng.randrange(1 << 64), rng.random()
        if what < 0.4:
            real[key] = value
            ours[key] = value
        elif what < 0.5:
            assert ours.setdefault(key, value) == real.setdefault(key, value)
        elif what < 0.9 and key in real:
            del real[key]
            del ours[key]
        assert ours.get(key) == real.get(key)
        assert (key in ours) == (key in real)
        assert len(ours) == len(real)
    assert all(ours.get(key) == value for key, value in real.items())


def test_what_is_absent_cannot_be_deleted() -> None:
    ours = Fingerprints()
    ours[5] = 1
    with pytest.raises(KeyError):
        del ours[5 + (1 << 60)]
    del ours[5]
    with pytest.raises(KeyError):
        del ours[5]
