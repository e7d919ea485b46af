"""The threads of a tier on a disk: each record of a batch is somebody's, the caller's too.

Law of this file: when a call has returned or raised, nobody works for it any more; one record's
trouble is that record's, and only if all is in vain the whole batch is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from kvass.errors import TierDown


class DiskWorkers:
    """``size`` threads that work on the disk which errors call ``name``."""

    def __init__(self, size: int, name: str) -> None:
        self._size, self._name = size, name
        self._pool = ThreadPoolExecutor(size, "kvass-disk")

    def each(self, one: Callable[[int], bool], which: Sequence[int]) -> list[bool]:
        """``one`` of each, by this thread and ours; what raised ``OSError`` is False. Raises
        ``TierDown`` if some did, and none is True."""
        done: list[bool | OSError] = [False] * len(which)
        todo = iter(range(len(which)))  # whoever is free takes the next

        def work() -> None:
            for at in todo:
                done[at] = _attempt(one, which[at])

        helping = min(self._size, len(which)) - 1
        helpers = [self._pool.submit(work) for _ in range(helping)]
        try:
            work()
        finally:  # whatever it raises, nobody touches the buffers after we return
            wait([helper for helper in helpers if not helper.cancel()])  # the others never came
        for helper in helpers:
            if not helper.cancelled():
                helper.result()
        errors = [answer for answer in done if isinstance(answer, OSError)]
        if errors and True not in done:
            raise TierDown(f"{self._name}: {errors[0]}") from errors[0]
        return [answer is True for answer in done]

    def close(self) -> None:
        """After the last call."""
        self._pool.shutdown()


def _attempt(one: Callable[[int], bool], i: int) -> bool | OSError:
    try:
        return one(i)
    except OSError as error:
        return error
