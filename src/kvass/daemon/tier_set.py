"""The processes of all tiers. The set of tiers can change while the daemon serves.

Law of this file: a change that fails leaves the tiers as they were. A tier whose options change
gets a new process. Two processes cannot use one store at the same time, so the old process ends
before the new one starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Sequence

from kvass.core.effects import FromTier, TierReport, TiersAre, ToTier
from kvass.daemon.tier_process.supervisor import TierProcess
from kvass.errors import ConfigError
from kvass.tiers.url import tier_name

Post = Callable[[FromTier | TierReport | TiersAre], None]
NumberOf = Callable[[str, Container[int]], int]
"""``(name, taken) -> number``: returns a number for a new tier called ``name``. The number is not
in ``taken``."""


class TierSet:
    """The tiers of a daemon, one process each. ``urls`` has the format of ``Config.tier``.
    ``arena_fd`` is the descriptor of the arena. ``inherited``: descriptors that each process has
    open until it ends. All methods are called in the loop's thread."""

    def __init__(
        self,
        urls: Sequence[str],
        arena_fd: int,
        arena_bytes: int,
        log_format: str = "text",
        inherited: Sequence[int] = (),
    ) -> None:
        self._inherited = inherited
        self._arena_fd, self._arena_bytes, self._log_format = arena_fd, arena_bytes, log_format
        self._used = [self._process(number, url) for number, url in enumerate(urls)]
        self._by_number = dict(enumerate(self._used))

    def __len__(self) -> int:
        return len(self._used)

    def _process(self, number: int, url: str) -> TierProcess:
        return TierProcess(
            number,
            url,
            tier_name(url),
            self._arena_fd,
            self._arena_bytes,
            log_format=self._log_format,
            inherited=self._inherited,
        )

    async def open(self, post: Post) -> None:
        """Open all tiers. Raises ``ConfigError`` if one cannot be opened."""
        opening = (tier.open(post) for tier in self._used)
        for error in await asyncio.gather(*opening, return_exceptions=True):
            if error is not None:
                raise error

    async def close(self) -> None:
        """Close all tiers, and wait until their processes have ended."""
        await asyncio.gather(*(tier.close() for tier in self._by_number.values()))

    def submit(self, effect: ToTier) -> None:
        self._by_number[effect.tier].submit(effect)

    async def change(self, urls: Sequence[str], number_of: NumberOf, post: Post) -> None:
        """Replace the tiers by those of ``urls``, and send ``TiersAre`` to the core.

        Open requests fail at a tier that is removed or whose options change. Raises ``ConfigError``
        if a tier cannot be opened.
        """
        early: dict[int, TierReport] = {}

        def post_once_used(event: FromTier | TierReport) -> None:
            """Keep back the reports of a tier until the core has received ``TiersAre`` with it."""
            if isinstance(event, TierReport) and event.tier not in {t.number for t in self._used}:
                early[event.tier] = event
            else:
                post(event)

        paired = _pair(urls, self._used)
        added: list[TierProcess] = []
        renewed: dict[TierProcess, str] = {}
        try:
            for url, tier in paired:
                if tier is None:
                    number = number_of(tier_name(url), self._by_number)
                    added.append(self._process(number, url))
                    self._by_number[number] = added[-1]
                    await added[-1].open(post_once_used)
            for url, tier in paired:
                if tier is not None and tier.url != url:
                    renewed[tier] = tier.url
                    await tier.renew(url)
        except ConfigError:
            for tier in added:
                await tier.close()
                del self._by_number[tier.number]
            for tier, url in renewed.items():
                await tier.go_back(url)
            raise
        before, new = self._used, iter(added)
        self._used = [tier or next(new) for _, tier in paired]
        numbers = tuple(tier.number for tier in self._used)
        names = tuple(tier_name(tier.url) for tier in self._used)
        post(TiersAre(numbers, names, tuple(tier.number for tier in renewed)))
        for report in early.values():
            post(report)
        for tier in before:
            if tier not in self._used:
                await tier.end_and_fail()
                del self._by_number[tier.number]


def _pair(
    urls: Sequence[str], tiers: Sequence[TierProcess]
) -> list[tuple[str, TierProcess | None]]:
    """Pair each URL with the tier of the same URL, else of the same name, else None."""
    left = list(tiers)

    def take(url: str, name_of: Callable[[str], str]) -> TierProcess | None:
        tier = next((t for t in left if name_of(t.url) == name_of(url)), None)
        if tier is not None:
            left.remove(tier)
        return tier

    exact = [take(url, str) for url in urls]
    return [(url, t or take(url, tier_name)) for url, t in zip(urls, exact, strict=True)]
