"""KV caches on a GPU go to the GPU's mover, or to nobody: no GPU is needed to see that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvass.client.parallel import ParallelStrategy
from kvass.engine import comparer, copier
from kvass.engine import memory as kv_memory
from kvass.engine.boundary import Boundary
from kvass.engine.memory import KVMemory, Regions, open_mover
from kvass.engine.step_work import GroupCompared, Load, ShadowCheck, Store
from kvass.layout.copy_plan import CopyPlan, plan_copy
from kvass.layout.describe import GroupPlanes, Plane
from kvass.transfer import open_device
from kvass.transfer.base import Done, Job, Outcome, U8Array
from kvass.transfer.batch import Batch, Kind, Region, Stage, Staging
from kvass.transfer.descriptors import KERNEL_BELOW
from kvass.transfer.device import Fault, MissingError, Operations, Stream
from kvass.transfer.device_mover import DeviceMover
from kvass.transfer.host import HostMover
from kvass.transfer.self_check import NO_KERNEL
from kvass.types import RankLayout
from tests.support.gpu.cpu_scratch import CpuScratch
from tests.support.gpu.fake_gpu import FakeGpu

PLANES = GroupPlanes(0, (Plane(0, 4096, 4096),), blocks=4, chunk_blocks=1)


class Device(SimpleNamespace):
    """A torch device."""

    def __init__(self, kind: str, index: int | None) -> None:
        super().__init__(type=kind, index=index)

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


def tensor(address: int, size: int, device: str, index: int | None = None) -> Any:
    storage = SimpleNamespace(data_ptr=lambda: address, nbytes=lambda: size)
    return SimpleNamespace(
        untyped_storage=lambda: storage,
        data_ptr=lambda: address,
        device=Device(device, index),
    )


def memory(*tensors: Any) -> KVMemory:
    regions = Regions()
    for number, one in enumerate(tensors):
        regions.add(f"layer{number}", one, 0)
    return KVMemory(
        RankLayout(()), (PLANES,), tuple(regions.arrays), tuple(regions.owners), tuple(regions.gpu)
    )


def test_pages_on_a_gpu_are_moved_by_the_gpus_mover(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeGpu(1)
    region, there = fake.allocate(4 * 4096)
    there[4096:8192] = 7
    asked: list[tuple[str, object, int]] = []

    def open_device(
        device: str, find: object, storages: Sequence[object]
    ) -> tuple[FakeGpu, Mapping[Kind, int]]:
        asked.append((device, find, len(storages)))
        return fake, NO_KERNEL

    monkeypatch.setattr(kv_memory, "open_device", open_device)
    mover = open_mover(memory(tensor(region.address, region.bytes, "xpu", 0)), find=find)
    assert isinstance(mover, DeviceMover)
    arena = fake.map(4096)
    mover.submit(Job("store", (plan_copy(PLANES, [[1]], [0]),), arena))
    assert mover.drain(10)
    mover.close()
    assert mover.poll()[0].ok
    assert (arena == 7).all()
    assert asked == [("xpu:0", find, 1)]
    assert fake.violations == []


def find(storages: Sequence[object]) -> Operations:
    """The operations of an engine that has none."""
    raise MissingError("this engine cannot copy")


def test_pages_on_the_cpu_are_not() -> None:
    here = np.zeros(4 * 4096, np.uint8)
    mover = open_mover(memory(tensor(here.ctypes.data, len(here), "cpu")))
    assert isinstance(mover, HostMover)


def test_a_gpu_that_cannot_be_used_is_one_line() -> None:
    with pytest.raises(MissingError, match="device cuda:0 failed its test: "):
        open_mover(memory(tensor(1 << 30, 4 * 4096, "cuda", 0)))


@pytest.mark.parametrize(
    ("second", "says"),
    [(("cuda", 1), "cuda:0, cuda:1"), (("cpu", None), "cuda:0, cpu")],
    ids=["two GPUs", "GPU and CPU"],
)
def test_mixed_devices_are_one_line_before_any_is_opened(
    second: tuple[str, int | None],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And the rank does not register: it runs uncached."""
    here = np.zeros(4 * 4096, np.uint8)
    found = memory(
        tensor(1 << 30, 4 * 4096, "cuda", 0), tensor(here.ctypes.data, 4 * 4096, *second)
    )
    opened: list[int] = []
    monkeypatch.setattr(kv_memory, "open_device", opened.append)
    boundary = Boundary()
    side = copier.Copier(setup_of_a_worker(), 0, boundary)
    boundary.run(None, side.attach, found)
    (line,) = caplog.records
    assert line.exc_info is None
    assert line.getMessage() == (
        "kvass is off, the engine runs uncached: "
        f"KV caches on several devices in one worker: {says}"
    )
    assert not boundary.counters
    assert side._client is None
    assert opened == []


def setup_of_a_worker() -> Any:
    """What a worker must know before it has found its pages."""
    return SimpleNamespace(
        strategy=ParallelStrategy(),
        register=lambda *_: SimpleNamespace(),
        chunk_tokens=0,
        groups=(),
    )


def test_of_a_lost_copy_the_daemon_is_told_nothing() -> None:
    """Not even that it failed: it may be reading or writing still (law 3)."""
    told: list[str] = []

    class Client:
        def __getattr__(self, name: str) -> Any:
            return lambda *args: told.append(name)

    class Arena:
        def close(self) -> None:
            told.append("left the arena")

    setup: Any = SimpleNamespace(strategy=ParallelStrategy())
    side = copier.Copier(setup, 0, Boundary())
    client: Any = Client()
    arena: Any = Arena()
    side._client = client
    store = Store(1, b"boot", 1, 0.0, 1.0, (), ())
    memory = np.zeros(1, np.uint8)
    ends: dict[Outcome, list[str]] = {"lost": [], "failed": ["abort", "left the arena"]}
    for outcome, expected in ends.items():
        side._copied(arena, Done(Job("store", (), memory, name=store), outcome))
        assert told == expected
    told.clear()
    load = Load("r", b"boot", 1)
    ends["failed"][0] = "release"
    for outcome, expected in ends.items():
        side._copied(arena, Done(Job("load", (), memory, name=load), outcome))
        assert told == expected


def test_the_mover_hears_how_much_of_the_arena_is_populated() -> None:
    """By the time the job was made: it grows, and nothing beyond is pinned, nor written to before
    it is known to have memory."""
    jobs: list[Job] = []
    setup: Any = SimpleNamespace(strategy=ParallelStrategy())
    side = copier.Copier(setup, 0, Boundary())
    lease: Any = SimpleNamespace(buffer=np.zeros(1, np.uint8), populated=123, close=None)
    lease.prepare = [].append
    client: Any = SimpleNamespace(arena=lambda *_: lease)
    mover: Any = SimpleNamespace(submit=jobs.append)
    side._client, side._mover = client, mover
    assert side._begin(Store(1, b"boot", 1, 0.0, 1.0, (), ()))
    lease.populated = 456
    assert side._begin(Load("r", b"boot", 1))
    assert [(job.kind, job.populated) for job in jobs] == [("store", 123), ("load", 456)]
    assert {job.prepare for job in jobs} == {lease.prepare}


class Adopting(FakeGpu):
    """A device of whatever memory it is given, with a fault in one way to copy."""

    wrong_way = deadly_way = ""

    def __init__(self) -> None:
        super().__init__(1, eager=40, watched=False)
        self.few = 1

    def copy(self, stream: Stream, batch: Batch) -> Fault | None:
        if batch.way == self.deadly_way:
            self.kill()
        if batch.way == self.wrong_way:
            batch.bytes[-1] -= np.uint64(8)
        return super().copy(stream, batch)

    def _is_device(self, address: int, count: int) -> bool:
        return self._of_scratch(address)

    def _of_scratch(self, address: int) -> bool:
        return any(at <= address < at + n for at, n in self.scratch)

    scratch: tuple[tuple[int, int], ...] = ()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[[Adopting], Any]:
    """Opens a fake device, with scratch pages in the host's memory."""
    kept: list[object] = []
    monkeypatch.setattr(open_device, "_kept", kept)
    monkeypatch.setattr(open_device, "TorchScratch", CpuScratch)

    def opens(fake: Adopting) -> Any:
        def runtime(device: str, operations: object, torch: object) -> FakeGpu:
            (scratch,) = kept[-1:]
            assert isinstance(scratch, CpuScratch)
            fake.scratch = ((scratch.region.address, scratch.region.bytes),)
            return fake

        monkeypatch.setattr(open_device, "DeviceRuntime", runtime)
        nothing: Any = Operations(lambda *_: None)
        return open_device.open_device("fake:0", lambda _: nothing, ()), kept

    return opens


def test_a_gpu_that_passes_its_test_is_used(
    opened: Callable[[Adopting], Any], caplog: pytest.LogCaptureFixture
) -> None:
    (_, below), kept = opened(Adopting())
    assert below is KERNEL_BELOW
    assert caplog.text == ""
    assert kept == []


def test_a_wrong_kernel_is_not_used(
    opened: Callable[[Adopting], Any], caplog: pytest.LogCaptureFixture
) -> None:
    fake = Adopting()
    fake.wrong_way = "kernel"
    (_, below), kept = opened(fake)
    assert below is NO_KERNEL
    assert "slower than they could be: the kernel" in caplog.text
    assert len(kept) == 1, "its pages: what did not end may still write there"


def test_a_gpu_that_copies_wrong_bytes_is_not_used(opened: Callable[[Adopting], Any]) -> None:
    fake = Adopting()
    fake.wrong_way = "dma"
    with pytest.raises(MissingError, match="failed its test: copies: a store left"):
        opened(fake)


@pytest.mark.parametrize("way", ["dma", "kernel"])
def test_a_gpu_that_dies_in_its_test_is_one_line(
    opened: Callable[[Adopting], Any], way: str
) -> None:
    fake = Adopting()
    fake.deadly_way = way
    with pytest.raises(MissingError, match="for the engine too: event: unspecified launch fail"):
        opened(fake)


def test_a_gpu_without_memory_for_its_test_is_one_line(
    opened: Callable[[Adopting], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(*_: object) -> None:
        raise RuntimeError("out of memory\nmore")

    monkeypatch.setattr(CpuScratch, "write", raising)
    with pytest.raises(MissingError, match=r"failed its test: out of memory$"):
        opened(Adopting())


def check_of() -> tuple[ShadowCheck, CopyPlan]:
    """A check of one row, and the plan of its load."""
    load = Load("r", b"boot", 1, deadline_s=1e12, blocks=((1,),))
    return ShadowCheck(1, load, 1, 1), plan_copy(PLANES, [[1]], [0])


def a_memory(pages: U8Array) -> KVMemory:
    return KVMemory(RankLayout(()), (PLANES,), (pages,), ())


class Deaths(HostMover):
    """A mover of which every job is lost, as if its device had died."""

    def poll(self) -> list[Done]:
        return [replace(done, outcome="lost") for done in super().poll()]


@pytest.mark.parametrize("dies", [True, False])
def test_of_a_lost_check_the_daemon_is_told_nothing(
    dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    kept: list[object] = []
    monkeypatch.setattr(comparer, "_lost", kept)
    arena: Any = SimpleNamespace(
        buffer=np.zeros(4096, np.uint8), populated=4096, close=lambda: told.append("left")
    )
    kind = Deaths if dies else HostMover
    pages = a_memory(np.zeros(4 * 4096, np.uint8))
    side = comparer.Comparer(pages, 0, Boundary(), lambda m, _: kind(m.regions, m.planes))
    check, plan = check_of()
    after: Any = None
    side.begin(check, (plan,), arena, after, lambda: told.append("release"))
    side.wait(30)
    ((_, result),) = side.ended()
    assert bool(result.error) is dies
    assert told == ([] if dies else ["left", "release"])
    assert kept == [side] * dies
    side.close()


def test_what_ends_for_a_check_does_not_stay_in_the_mover() -> None:
    """Also if there is nothing to store, so that no copy of the engine's own is polled."""
    side = copier.Copier(setup_of_a_worker(), 0, Boundary())
    mover = HostMover((np.zeros(4 * 4096, np.uint8),), (PLANES,))
    check, plan = check_of()
    comparing: Any = SimpleNamespace(ended=list)
    side._mover, side._comparer = mover, comparing
    mover.submit(Job("store", (plan,), np.zeros(4096, np.uint8), name=check))
    assert mover.drain(30)
    side.results()
    assert not mover.poll()
    mover.close()


@pytest.mark.parametrize("pins", [True, False])
def test_a_mover_may_be_told_to_pin_nothing(pins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA refuses to pin memory twice, so the movers of the comparer pin none."""
    fake = FakeGpu(1)
    region, _ = fake.allocate(4 * 4096)
    monkeypatch.setattr(kv_memory, "open_device", lambda *_: (fake, KERNEL_BELOW))
    monkeypatch.setattr(kv_memory, "open_untested", lambda *_: fake)
    mover = open_mover(memory(tensor(region.address, region.bytes, "cuda", 0)), pins)
    arena = fake.map(4096)
    mover.submit(Job("load", (plan_copy(PLANES, [[1]], [0]),), arena))
    assert mover.drain(10)
    assert bool(fake.registered) is pins
    mover.close()
    assert mover.poll()[0].ok


@pytest.mark.parametrize(("pins", "stages"), [(True, True), (True, False), (False, True)])
def test_stages_that_are_worth_it_reach_the_mover(
    pins: bool, stages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If they are asked for, and unless it pins nothing: then nothing can be copied in one
    piece."""
    fake = FakeGpu(1)
    fake.few = fake.fewest_staged = 1
    region, pages = fake.allocate(4 * 4096)
    pages[:] = 5
    stage = fake.open_stage(8 * 4096)
    assert isinstance(stage, Stage)
    chosen = {"store": Staging(1 << 20, (stage,))}
    monkeypatch.setattr(kv_memory, "open_device", lambda *_: (fake, KERNEL_BELOW))
    monkeypatch.setattr(kv_memory, "open_untested", lambda *_: fake)
    monkeypatch.setattr(kv_memory, "choose_stagings", lambda *_: chosen)
    pages_of = memory(tensor(region.address, region.bytes, "cuda", 0))
    mover = open_mover(pages_of, pins, stages=stages)
    assert isinstance(mover, DeviceMover)
    arena = fake.map(2 * 4096)
    mover.submit(Job("store", (plan_copy(PLANES, [[1], [3]], [0, 4096]),), arena))
    assert mover.drain(10)
    mover.close()
    assert mover.poll()[0].ok
    assert mover.ways == {("staged" if stages else "dma") if pins else "pageable"}
    assert (arena == 5).all()
    assert fake.violations == []


def test_pages_on_a_gpu_are_compared_after_the_forward_pass() -> None:
    """Scratch memory is on the GPU, too. The check begins when the engine's mover has seen the end
    of the forward pass."""
    fakes: list[FakeGpu] = []
    arrays: dict[int, U8Array] = {}

    class Storage:
        """A storage of torch on the fake device."""

        def __init__(self, size: int, device: str) -> None:
            self.device, self._pages = device, np.zeros(size, np.uint8)
            arrays[self.data_ptr()] = self._pages

        def data_ptr(self) -> int:
            return self._pages.ctypes.data

    def make(found: KVMemory, pins: bool) -> DeviceMover:
        assert not pins
        fakes.append(fake := FakeGpu(len(fakes), eager=40))
        for one in found.gpu:
            fake.adopt(arrays[one.address])
        return DeviceMover(fake, found.gpu, found.planes, kernel_below={})

    storage = Storage(4 * 4096, "cuda:0")
    pages, region = arrays[storage.data_ptr()], Region(storage.data_ptr(), 4 * 4096)
    found = KVMemory(RankLayout(()), (PLANES,), (), (storage,), (region,))
    side, after = comparer.Comparer(found, 0, Boundary(), make), make(found, False)
    arena: Any = SimpleNamespace(buffer=np.full(4096, 7, np.uint8), populated=4096)
    arena.close = lambda: None
    check, plan = check_of()
    pages[4096:8192] = 7
    pages[4100] = 9
    side.begin(check, (plan,), arena, after, lambda: None)
    side.wait(30)
    ((_, result),) = side.ended()
    assert not result.error
    assert result.groups == (GroupCompared(1, 4096, 1, 2.0, 9.0, 0),)
    assert len(after.poll()) == 1, "the end of the forward pass"
    after.close()
    side.close()
    assert not any(fake.violations for fake in fakes)
    assert pages[4100] == 9, "nothing was written to the pages"
    assert not pages[:4096].any()
