"""A soak with a second node: a daemon without tiers and with half of the L1, to which the second
ranks of engines over nodes connect. It is killed, ended and suspended as the first one is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from kvass.testing.daemon import Daemon
from tests.support.soak.world import OPTIONS, Mischief, SoakError, World

L1_SIZE: Final = "16MiB"


def second_socket(first: Path) -> Path:
    """Of the second daemon, by that of the first."""
    return first.parent / "second" / first.name


class NodesWorld(World):
    """See the top of this file. Its verdict is about the first daemon; of the second one is looked
    at what it holds at the end, and whether it ended by itself."""

    def start_tiers(self) -> list[str]:
        folder = second_socket(Path(self.socket)).parent
        folder.mkdir()
        self.second = Daemon(folder, {**OPTIONS, "l1_size": L1_SIZE})
        self.servers.callback(self.end_second)
        self.start_second()
        return super().start_tiers()

    def start_second(self) -> None:
        self.second.start()
        self.second_expected = True

    def end_second(self) -> None:
        self.second_expected = False
        self.second.kill()

    def check_alive(self) -> None:
        super().check_alive()
        if self.second_expected and not self.second.running:
            raise SoakError(f"the second daemon ended: {self.second.log()[-3000:]}")

    def held_elsewhere(self, names: tuple[str, ...]) -> dict[str, object]:
        status = self.second.status()
        return {f"second {name}": status[name] for name in names if status[name]}


def _nodes(world: World) -> NodesWorld:
    assert isinstance(world, NodesWorld)
    return world


def second_killed(world: World, _: int) -> Iterator[None]:
    _nodes(world).end_second()
    yield
    _nodes(world).start_second()


def second_ended(world: World, _: int) -> Iterator[None]:
    nodes = _nodes(world)
    nodes.second_expected = False
    if status := nodes.second.stop():
        raise SoakError(f"SIGTERM: the second daemon ended with {status}: {nodes.second.log()}")
    yield
    nodes.start_second()


def second_suspended(world: World, _: int) -> Iterator[None]:
    _nodes(world).second.suspend()
    yield
    _nodes(world).second.resume()


MISCHIEF: Final[Mapping[str, tuple[str, Mischief]]] = {
    "second daemon killed": ("second", second_killed),
    "second daemon ended": ("second", second_ended),
    "second daemon suspended": ("second", second_suspended),
}
"""As ``world.MISCHIEF``, of the second daemon."""
