"""The processes of a soak: a daemon with its tiers, Redis, engines; and what is done to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import msgspec

from kvass.client.client import Client
from kvass.errors import Refused, Unavailable
from kvass.testing.daemon import Daemon
from tests.support.servers.redis import RedisServer
from tests.support.soak.engine import Line, Setup

DISK_BYTES: Final = 48 << 20
OPTIONS: Final = {
    "lease_s": 1.5,
    "reserve_s": 1.5,
    "lost_engine_grace_s": 0.5,
    "stop_s": 1,
}
"""L1 and tiers are so small that they evict; deadlines are shorter than what suspends."""
PROGRAM: Final = ("-m", "tests.support.soak.checked_daemon")


class SoakError(Exception):
    """What ends a run: a wrong byte, or the end of a process that nobody killed."""


class Engine:
    """Processes of one engine, one after the other. ``name`` is for people."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        self.setup = setup
        self.name = f"{setup.kind or 'engine'} {setup.number}"
        self.total = Counter[str]()
        self.longest_s = 0.0
        module = f"{setup.kind}_engine" if setup.kind else "engine"
        self._module = f"tests.support.soak.{module}"
        self._log = folder / f"{self.name.replace(' ', '-')}.log"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", self._module, msgspec.json.encode(self.setup).decode()]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self._heard, self.serves, self.killed = b"", False, False

    def send(self, number: signal.Signals) -> None:
        """To all its processes, if it has not been waited for."""
        if self.process.returncode is None:
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """SIGKILL. Idempotent."""
        assert self.process.stdout is not None
        if self.killed:
            return
        self.send(signal.SIGKILL)
        self.process.wait()
        try:
            self.hear()
        finally:
            self.process.stdout.close()
            self.serves, self.killed = False, True

    def hear(self) -> list[Line]:
        """What it said since. Raises ``SoakError`` for a wrong page."""
        assert self.process.stdout is not None
        if self.killed:
            return []
        data = self.process.stdout.read() or b""
        *lines, self._heard = (self._heard + data).split(b"\n")
        said = [msgspec.json.decode(line, type=Line) for line in lines]
        for line in said:
            if line.wrong:
                raise SoakError(f"{self.name}, request {line.n}: WRONG BYTES: {line.wrong}")
            self.serves, self.setup.first = True, line.n + 1
            self.longest_s = max(self.longest_s, line.s)
            self.total += Counter(requests=1, asked=line.asked, hit=line.hit, pages=line.pages)
        return said

    def check_alive(self) -> None:
        if (status := self.process.poll()) is not None:
            self.hear()
            text = self._log.read_text(errors="replace")[-3000:]
            raise SoakError(f"{self.name} ended with status {status}: {text}")


class World:
    """All of it, from a folder of its own. ``program``: as for ``Daemon``. ``compress``: of
    all tiers; empty: as by default."""

    def __init__(
        self,
        folder: Path,
        setups: list[Setup],
        options: Mapping[str, str | list[str]],
        program: Sequence[str],
        compress: str = "",
    ) -> None:
        self.folder = folder
        self.socket = str(folder / "kvass.sock")
        self.engines: list[Engine] = []
        self.daemon_expected = False
        self.disk = folder / "disk"
        self.disk.mkdir(mode=0o755)
        self.client = Client(self.socket)
        self.servers = ExitStack()
        """Ends those of the tiers."""
        with ExitStack() as undo:
            undo.callback(self.servers.close)
            tiers = [url + (compress and f"&compress={compress}") for url in self.start_tiers()]
            undo.pop_all()
        self.tiers = [url.partition(":")[0] for url in tiers]
        self.daemon = Daemon(folder, {**OPTIONS, **options, "tier": tiers}, program)
        try:
            self.start_daemon()
            for setup in setups:
                self.engines.append(Engine(setup, folder))
        except BaseException:
            self.close()
            raise

    def start_tiers(self) -> list[str]:
        """Starts their servers. The tiers' URLs."""
        self.redis = RedisServer("--maxmemory", "24mb", "--maxmemory-policy", "allkeys-lru")
        self.servers.callback(self.redis.close)
        return [
            f"disk:{self.disk}?capacity={DISK_BYTES}",
            f"redis:{self.redis.address}?timeout_s=2",
        ]

    def held_elsewhere(self, names: tuple[str, ...]) -> dict[str, object]:
        """What other daemons hold of what has these names in their status."""
        return {}

    def check_alive(self) -> None:
        """Raises ``SoakError`` if a process has ended by itself."""
        for engine in self.engines:
            if not engine.killed:
                engine.check_alive()
        if self.daemon_expected and not self.daemon.running:
            raise SoakError(f"the daemon ended: {self.daemon.log()[-3000:]}")

    def tier_pid(self, name: str) -> int | None:
        """The process of the daemon's tier ``name``."""
        for task in Path(f"/proc/{self.daemon.pid}/task").glob("*/children"):
            with suppress(OSError):
                for pid in task.read_text().split():
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                    if b"kvass.daemon.tier_process.server" in words and any(
                        word.startswith(name.encode() + b":") for word in words
                    ):
                        return int(pid)
        return None

    def disk_bytes(self) -> int:
        """What the disk tier's files take."""
        taken = 0
        for file in self.disk.iterdir():
            with suppress(FileNotFoundError):
                taken += file.stat().st_blocks * 512
        return taken

    def start_daemon(self) -> None:
        self.daemon.start()
        self.daemon_expected = True

    def stop_daemon(self) -> None:
        self.daemon_expected = False
        if status := self.daemon.stop():
            raise SoakError(f"SIGTERM: the daemon ended with {status}: {self.daemon.log()[-3000:]}")

    def end_engines(self) -> None:
        for engine in self.engines:
            engine.kill()

    def close(self) -> None:
        for engine in self.engines:
            with suppress(SoakError):  # the first one was told
                engine.kill()
        self.client.close()
        self.daemon_expected = False
        self.daemon.kill()
        self.servers.close()


Mischief = Callable[[World, int], Iterator[None]]
"""Does something, yields, and undoes it; or yields never, if it cannot be done now. The number says
to which engine."""


def engine_killed(world: World, number: int) -> Iterator[None]:
    """Never the first, whose memory is watched."""
    engine = world.engines[1 + number % (len(world.engines) - 1)]
    if engine.serves:
        engine.kill()
        yield
        engine.start()


def engine_suspended(world: World, number: int) -> Iterator[None]:
    engine = world.engines[number % len(world.engines)]
    if engine.serves:
        engine.send(signal.SIGSTOP)
        yield
        engine.send(signal.SIGCONT)


def rank_killed(world: World, number: int) -> Iterator[None]:
    fake = [engine for engine in world.engines if engine.serves and not engine.setup.kind]
    if fake:
        fake[number % len(fake)].process.send_signal(signal.SIGUSR1)
        yield


def daemon_killed(world: World, _: int) -> Iterator[None]:
    world.daemon_expected = False
    world.daemon.kill()
    yield
    world.start_daemon()


def daemon_ended(world: World, _: int) -> Iterator[None]:
    world.stop_daemon()
    yield
    world.start_daemon()


def daemon_suspended(world: World, _: int) -> Iterator[None]:
    world.daemon.suspend()
    yield
    world.daemon.resume()


def cleared(world: World, _: int) -> Iterator[None]:
    with suppress(Unavailable):
        with suppress(Refused):  # a tier is down: it is told later
            world.client.clear(everything=True, timeout_s=0.5)
        yield


def tier(name: str, signal_: signal.Signals) -> Mischief:
    def of_its_process(world: World, _: int) -> Iterator[None]:
        if (pid := world.tier_pid(name)) is not None:
            process = os.pidfd_open(pid)
            signal.pidfd_send_signal(process, signal_)
            yield
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGCONT)
            os.close(process)

    return of_its_process


def redis_killed(world: World, _: int) -> Iterator[None]:
    world.redis.kill()
    yield
    world.redis.start()


def redis_suspended(world: World, _: int) -> Iterator[None]:
    world.redis.pause(True)
    yield
    world.redis.pause(False)


MISCHIEF: Final[dict[str, tuple[str, Mischief]]] = {
    "daemon killed": ("daemon redis", daemon_killed),
    "daemon ended": ("daemon redis", daemon_ended),
    "disk tier killed": ("disk", tier("disk", signal.SIGKILL)),
    "daemon suspended": ("daemon", daemon_suspended),
    "disk tier suspended": ("disk", tier("disk", signal.SIGSTOP)),
    "redis tier killed": ("tier", tier("redis", signal.SIGKILL)),
    "redis tier suspended": ("tier", tier("redis", signal.SIGSTOP)),
    "redis killed": ("redis", redis_killed),
    "redis suspended": ("redis", redis_suspended),
    "engine killed": ("engine", engine_killed),
    "engine suspended": ("engine", engine_suspended),
    "rank killed": ("engine", rank_killed),
    "cleared": ("daemon", cleared),
}
"""By name, and what no other may touch meanwhile."""
EARLY: Final = ("daemon killed", "daemon ended", "disk tier killed")
"""In a run's first quarter only: the memory of these processes is watched from then on."""
SELDOM: Final = ("cleared", "redis tier killed")
"""Once in three rounds: one takes all hits, and pauses get longer after the other."""
