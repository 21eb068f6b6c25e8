"""How many threads read the disks: by disks and processors, and as many do read at once."""

import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.chain_runner import chain_layout
from tests.support.faulty_storage import chain, take
from tiers.blocks.frames import Frame, FrameArena
from tiers.blocks.keys import BlockId
from tiers.disk import readers
from tiers.disk.array import open_array
from tiers.disk.open import open_disk
from tiers.disk.readers import readers_for
from tiers.disk.settings import DiskSettings
from tiers.disk.tier import DiskTier
from tiers.node.below import open_below
from tiers.node.settings import NodeSettings
from tiers.telemetry.events import EventStream
from tiers.tier import Loaded, ManagedTier
from tiers.transfer.mover import Mover, ProbeJob

Load = Callable[[Sequence[BlockId], Sequence[Frame]], Loaded]


@pytest.mark.parametrize(
    ("disks", "cpus", "expected"),
    [
        (1, 1, 2),
        (1, 2, 2),
        (1, 8, 2),
        (1, 16, 4),
        (1, 192, 4),
        (2, 16, 4),
        (4, 192, 16),
        (0, 64, 2),
    ],
)
def test_four_read_a_disk_on_a_quarter_of_the_processors(
    disks: int, cpus: int, expected: int
) -> None:
    assert expected == readers_for(disks, num_cpus=cpus)


@pytest.mark.parametrize(
    ("disks", "cpus", "expected"),
    [(1, 1, 2), (1, 8, 4), (1, 16, 8), (1, 192, 8), (2, 16, 8), (4, 192, 32)],
)
def test_eight_read_a_disk_on_half_of_the_processors_where_a_gpu_computes(
    disks: int, cpus: int, expected: int
) -> None:
    assert expected == readers_for(disks, computes_elsewhere=True, num_cpus=cpus)


@pytest.mark.parametrize(("elsewhere", "expected"), [(False, 4), (True, 8)])
def test_a_tier_and_an_array_have_as_many_and_measure_for_them(
    elsewhere: bool, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 16 processors. Two disks share what one has there, and each weighs its rates by its
    half."""
    machine = type("Machine", (), {"sched_getaffinity": lambda _: [0] * 16})
    monkeypatch.setattr(readers, "os", machine)
    settings = DiskSettings(computes_elsewhere=elsewhere)

    def opened(root: Path) -> DiskTier:
        return open_disk(root, chain_layout(4), 64 << 20, settings=settings)

    with closing(opened(tmp_path / "one")) as tier:
        assert [expected, expected] == [tier.num_readers, tier._rates.num_readers]
    roots = [tmp_path / "two", tmp_path / "three"]
    with closing(open_array(roots, opened)) as array:
        assert expected == array.num_readers
        assert [expected // 2] * 2 == [disk._rates.num_readers for disk in array._open()]


def test_a_node_is_beside_an_engine_that_computes_elsewhere(tmp_path: Path) -> None:
    settings = NodeSettings(
        socket=tmp_path / "socket", host_bytes=1 << 20, disk_dirs=(tmp_path,), disk_bytes=64 << 20
    )
    with closing(open_below(settings, chain_layout(4), None, EventStream())) as below:
        assert isinstance(below, DiskTier) and below.settings.computes_elsewhere


def test_only_a_disk_s_own_threads_keep_memory_for_its_records(tmp_path: Path) -> None:
    """However many movers ask, and of however few blocks."""
    layout = chain_layout(4)
    roots = [tmp_path / "a", tmp_path / "b"]
    opened = open_array(roots, lambda root: open_disk(root, layout, 64 << 20))
    names: set[str] = set()
    with closing(opened) as array:
        for disk in array._open():
            load = disk.load

            def noted(ids: Sequence[BlockId], into: Sequence[Frame], load: Load = load) -> Loaded:
                names.add(threading.current_thread().name)
                return load(ids, into)

            disk.load = noted  # type: ignore[method-assign]
        [frame] = take(FrameArena(layout, 1), 1)
        for block in chain(8, block_size=layout.block_size, seed=0):
            array.load([block], [frame])
    assert names and all(name.startswith("cachesvc-read-") for name in names)


@pytest.mark.parametrize("count", [1, 3])
def test_as_many_threads_read_at_once(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        readers, "os", type("Machine", (), {"sched_getaffinity": lambda _: [0] * 64})
    )
    layout = chain_layout(4)
    roots = [tmp_path / str(number) for number in range(count)]
    met = threading.Barrier(4 * count)

    class Meeting(ProbeJob):
        def run(self, tier: ManagedTier) -> None:
            met.wait(10)

    opened = open_array(roots, lambda root: open_disk(root, layout, 64 << 20))
    with closing(opened) as tier:
        mover = Mover(tier)
        mover.start()
        jobs = [Meeting([]) for _ in range(4 * count)]
        assert all(mover.submit(job) for job in jobs)
        mover.close()
    assert not met.broken
