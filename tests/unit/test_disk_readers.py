"""How many threads read the disks, by disks and processors, as many do read at once, and what a
node's disk leaves to others on its file system."""

import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from types import SimpleNamespace

import pytest

from tests.support.chain_runner import chain_layout
from tests.support.commands import said
from tiers.blocks.frames import Frame
from tiers.blocks.keys import BlockId
from tiers.disk import readers
from tiers.disk.open import open_disk
from tiers.disk.readers import readers_for
from tiers.disk.settings import DiskSettings
from tiers.disk.tier import DiskTier
from tiers.node.below import open_below
from tiers.node.settings import NodeSettings
from tiers.telemetry.events import EventStream
from tiers.tier import Loaded, ManagedTier
from tiers.transfer.mover import Mover, ProbeJob

MIB = 1 << 20
Load = Callable[[Sequence[BlockId], Sequence[Frame]], Loaded]


@pytest.mark.parametrize(
    ("elsewhere", "readers"),
    [(False, {1: 2, 2: 2, 8: 2, 16: 4, 192: 4}), (True, {1: 2, 8: 4, 16: 8, 192: 8})],
)
def test_a_quarter_of_the_processors_reads_and_half_where_a_gpu_computes(elsewhere, readers):
    counted = {cpus: readers_for(computes_elsewhere=elsewhere, num_cpus=cpus) for cpus in readers}
    assert readers == counted


@pytest.mark.parametrize(("elsewhere", "expected"), [(False, 4), (True, 8)])
def test_a_tier_has_as_many(elsewhere, expected, tmp_path, monkeypatch):
    """On 16 processors."""
    monkeypatch.setattr(readers, "os", SimpleNamespace(sched_getaffinity=lambda _: [0] * 16))
    settings = DiskSettings(computes_elsewhere=elsewhere)

    with closing(open_disk(tmp_path, chain_layout(4), 64 << 20, settings=settings)) as tier:
        assert expected == tier.num_readers


def test_a_node_is_beside_an_engine_that_computes_elsewhere(tmp_path):
    settings = NodeSettings(
        socket=tmp_path / "socket", host_bytes=1 << 20, disk_dir=tmp_path, disk_bytes=64 << 20
    )
    with closing(open_below(settings, chain_layout(4), None, EventStream())) as below:
        assert isinstance(below, DiskTier) and below.settings.computes_elsewhere


def test_as_many_threads_read_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "os", SimpleNamespace(sched_getaffinity=lambda _: [0] * 64))
    met = threading.Barrier(4)

    class Meeting(ProbeJob):
        def run(self, tier: ManagedTier) -> None:
            met.wait(10)

    with closing(open_disk(tmp_path, chain_layout(4), 64 << 20)) as tier:
        mover = Mover(tier)
        mover.start()
        jobs = [Meeting([]) for _ in range(4)]
        assert all(mover.submit(job) for job in jobs)
        mover.close()
    assert not met.broken


def test_the_option_of_a_nodes_reserve_reaches_the_settings(tmp_path, monkeypatch):
    told: list[NodeSettings] = []
    monkeypatch.setattr("cachesvc.server.node.run_node", lambda node, **_: told.append(node))
    monkeypatch.setattr("cachesvc.server.logs.configure", lambda log: None)
    for more in ([], ["--disk-reserve", "64MiB"]):
        said("node", "--socket", tmp_path / "s", "--disk-cache-dir", tmp_path, *more)
    assert [None, 64 * MIB] == [each.disk_reserve_bytes for each in told]


def test_the_disk_of_a_node_leaves_its_reserve(tmp_path):
    """More than any file system has, so that nothing is left for blocks."""
    sizes = []
    for reserve in (0, 1 << 60):
        settings = NodeSettings(
            socket=tmp_path / "s",
            host_bytes=MIB,
            disk_dir=tmp_path / str(reserve),
            disk_bytes=64 * MIB,
            disk_reserve_bytes=reserve,
        )
        with closing(open_below(settings, chain_layout(4), None, EventStream())) as tier:
            sizes.append(tier.stats().capacity_bytes)
    assert sizes[0] == 64 * MIB > sizes[1]
