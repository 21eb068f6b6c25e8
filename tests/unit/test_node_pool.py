"""A node's pool: frames are conserved, blocks are proven, and nothing is served half written."""

import mmap
import os
import threading
from contextlib import closing
from types import SimpleNamespace

import pytest

from tests.support.memory_tier import MemoryTier, SteppedMover
from tiers.blocks.keys import CacheScope, PrefixKey, block_ids, token_bytes
from tiers.disk.open import open_disk
from tiers.node import pool as pool_module
from tiers.node import spares as spares_module
from tiers.node.arena import create, frame_stride
from tiers.node.capacity import Capacity
from tiers.node.messages import engine_layout
from tiers.node.pool import Pool
from tiers.node.spares import SpareFrames
from tiers.operations.purge import Purger
from tiers.telemetry.events import CacheEvent
from tiers.tier import TierName
from tiers.transfer.economy import CostLine
from tiers.transfer.mover import LoadJob, Mover

LAYOUT = engine_layout(2, 256, 4, "float32")
ROOT = CacheScope(weights=b"w").root()
OTHER = CacheScope(weights=b"v").root()


def prompt(number, num_blocks=3):
    """Of two scopes: odd and even numbers are two tenants'."""
    return block_ids(OTHER if number % 2 else ROOT, token_bytes([number] * 4 * num_blocks), 4)


def pool_of(num_frames, mover=None):
    stride = frame_stride(LAYOUT)
    return Pool(create(LAYOUT, num_frames), Capacity(num_frames * stride), mover)


def two_pools(num_frames):
    """Pools of two layouts over one capacity, of so many frames of the larger or twice as many."""
    other = engine_layout(4, 256, 4, "float32")
    capacity = Capacity(num_frames * frame_stride(other))
    return Pool(create(LAYOUT, 2 * num_frames), capacity), Pool(create(other, num_frames), capacity)


def write(pool, ids, client=1):
    """Store blocks whose bytes tell their key; the frames written."""
    pairs = pool.reserve(ids)
    for position, frame in pairs:
        pool.memory.rows[frame, :16] = bytes_of(ids[position].key)
    pool.commit([frame for _, frame in pairs])
    return [frame for _, frame in pairs]


def bytes_of(key):
    import torch

    return torch.tensor(list(key), dtype=torch.uint8)


def read(pool, frame):
    return bytes(pool.memory.rows[frame, :16].tolist())


def finished(pool, lease):
    while not lease.is_ready:
        pool.work()
    return pool.settle(lease)


def of_scopes(pool, *roots):
    return [block for block in pool.residency.index if block.scope in roots]


def purge(pool, root):
    """Blocks of a scope removed from memory, and how many of them are in use."""
    purged = Purger(pool.residency, None, lambda roots: []).start([root]).result(0)
    return purged.removed[TierName.HOST].num_blocks, purged.in_use


def test_what_is_being_written_is_served_to_nobody():
    pool = pool_of(8)
    ids = prompt(1)
    pairs = pool.reserve(ids)
    assert [] == pool.probe(ids).tiers
    assert [] == finished(pool, pool.lease(ids))
    assert [] == pool.reserve(ids), "another client need not write it too"
    pool.abandon([frame for _, frame in pairs])
    assert 0 == pool.residency.host.num_blocks
    pool.check()


def test_an_equal_key_of_another_block_is_a_miss():
    pool = pool_of(8)
    ids = prompt(1)
    write(pool, ids)
    forged = [each._replace(tokens=each.tokens[::-1] + b"") for each in ids]
    forged[0] = forged[0]._replace(scope=PrefixKey(bytes(16)))
    assert [] == pool.probe(forged).tiers
    assert [] == pool.settle(pool.lease(forged))
    assert [] == pool.reserve(forged)
    assert 0 < pool.counts.collisions
    pool.check()


def test_the_end_of_a_prompt_leaves_before_its_beginning():
    pool = pool_of(4)
    write(pool, prompt(1, 4))
    write(pool, prompt(2, 2))
    assert [TierName.HOST] * 2 == pool.probe(prompt(1, 4)).tiers
    assert (2, 0) == (pool.count_of(CacheEvent.EVICTED), pool.lost)
    pool.check()


@pytest.fixture
def below(tmp_path):
    with closing(open_disk(tmp_path / "disk", LAYOUT, 64 << 20)) as disk:
        mover = Mover(disk)
        mover.start()
        with closing(mover):
            yield mover


def sink(pool, ids, num_others):
    """Have blocks below memory alone: others took their room."""
    for each in (ids, prompt(2, num_others)):
        write(pool, each)
        while pool.is_writing:
            pool.work()


def test_a_fetched_run_is_found_while_it_loads_and_kept_until_it_is_leased(below, monkeypatch):
    pool = pool_of(16, below)
    ids = prompt(1, 4)
    sink(pool, ids, 16)
    pool.fetch(ids)
    assert [TierName.DISK] * 4 == pool.probe(ids).tiers
    while pool._loads:
        pool.work()
    assert [TierName.HOST] * 4 == pool.probe(ids).tiers
    assert 12 == len(pool.reserve(prompt(4, 16))), "what was fetched stays"
    frames = finished(pool, pool.lease(ids))
    assert [each.key for each in ids] == [read(pool, frame) for frame in frames]
    assert (4, 0) == (pool.counts.hits[TierName.DISK], pool.counts.hits[TierName.HOST])
    pool.release(frames)
    assert 4 == pool.capacity.num_idle
    pool.check()


@pytest.mark.parametrize("seconds", [-1.0, 60.0])
def test_a_fetched_run_that_nobody_leases_does_not_stay_for_good(below, monkeypatch, seconds):
    monkeypatch.setattr(pool_module, "FETCHED_S", seconds)
    pool = pool_of(16, below)
    ids = prompt(1, 6)
    sink(pool, ids, 16)
    pool.fetch(ids)
    pool.fetch(ids)
    while pool._loads:
        pool.work()
    assert (16 if seconds < 0 else 12) == pool.capacity.num_idle, "a quarter at most is kept"
    pool.check()


def test_a_run_is_timed_from_its_first_job_to_its_last(below, monkeypatch):
    pool = pool_of(40, below)
    ids = prompt(1, 6)
    sink(pool, ids, 40)
    assert {} == pool.load_lines
    times = SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr(pool_module, "time", times)
    monkeypatch.setattr(pool_module, "JOB_BYTES", 1)
    monkeypatch.setattr(pool_module, "JOBS_PER_RUN", 3)
    run = pool_module._LoadRun
    monkeypatch.setattr(pool_module, "_LoadRun", lambda: run(begun_s=10.0))
    lease = pool.lease(ids)
    assert 3 == len(pool._loads)
    times.monotonic = lambda: 12.0
    pool.release(finished(pool, lease))
    assert {TierName.DISK: CostLine(0.0, 2.0 / (6 * LAYOUT.nbytes))} == pool.load_lines
    pool.check()


def test_readers_share_a_run_in_a_bounded_number_of_jobs(below, monkeypatch):
    pool = pool_of(40, below)
    ids = prompt(1, 40)
    sink(pool, ids, 40)
    jobs = []
    submit = below.submit

    def counted(job):
        jobs.append(len(job.ids) if isinstance(job, LoadJob) else 0)
        return submit(job)

    monkeypatch.setattr(below, "submit", counted)
    monkeypatch.setattr(pool_module, "JOB_BYTES", 1)
    frames = finished(pool, pool.lease(ids))
    assert [each.key for each in ids] == [read(pool, frame) for frame in frames]
    assert [3] * 13 + [1] == jobs, "each of a sixteenth, at least"
    pool.release(frames)
    pool.check()


def test_two_clients_wait_for_one_load(below):
    pool = pool_of(4, below)
    ids = prompt(1, 4)
    sink(pool, ids, 4)
    first, second = pool.lease(ids), pool.lease(ids)
    assert finished(pool, first) == finished(pool, second)
    assert 4 == pool.counts.hits[TierName.DISK]
    pool.check()


def test_a_pinned_block_leaves_last_and_never_where_it_stands_nowhere_else():
    pool = pool_of(3)
    write(pool, prompt(1, 2))
    pool.residency.pinned_keys = {each.key for each in prompt(1, 2)}
    for each in prompt(1, 2):
        block = pool.residency.ready(each.key)
        pool.residency.pin(block)
    write(pool, prompt(2, 1))
    assert 1 == len(pool.reserve(prompt(4, 3))), "what is not pinned made room"
    assert 2 == len(pool.probe(prompt(1, 2)).tiers)
    pool.check()


@pytest.mark.parametrize("pinned", [False, True])
def test_a_locked_frame_is_not_given_up_for_another_layout_which_has_the_rest(pinned):
    """Its memory would not go there, so every block of its layout would leave for nothing."""
    small, large = two_pools(5)
    small.memory.piece_frames = 4
    ids = prompt(1, 10)
    write(small, ids)
    assert [True, True] == [small.arena.lock(piece) for piece in (0, 1)]
    assert not small.arena.lock(2), "a tenth is left to others"
    if pinned:
        small.residency.pinned_keys = {each.key for each in ids}
        for block in of_scopes(small, OTHER):
            small.residency.queue.loaded(block, held=True)
            small.residency.pin(block)
    assert 1 == len(large.reserve(prompt(2, 5)))
    assert 8 == small.residency.host.num_blocks
    for pool in (small, large):
        pool.check()
    small.arena.unlock(0)
    assert 2 == len(large.reserve(prompt(4, 5)))
    assert 4 == small.residency.host.num_blocks
    for pool in (small, large):
        pool.check()


def test_free_frames_of_a_locked_piece_count_and_are_taken_first():
    pool = pool_of(8)
    pool.memory.piece_frames = 3
    write(pool, prompt(1, 1))
    assert [True, True] == [pool.arena.lock(1) for _ in range(2)], "two clients"
    assert 3 * pool.arena.stride == pool.capacity.kept_bytes
    assert [3, 4, 5, 1] == write(pool, prompt(2, 4))
    pool.check()
    purge(pool, ROOT)
    assert 3 * pool.arena.stride == pool.capacity.kept_bytes == pool.arena.num_locked_bytes
    pool.arena.unlock(1)
    assert 3 * pool.arena.stride == pool.capacity.kept_bytes, "the other has it still"
    pool.arena.unlock(1)
    assert (0, 1) == (pool.capacity.kept_bytes, pool.residency.host.num_blocks)
    assert 7 == len(pool.reserve(prompt(2, 7)))
    pool.check()


def test_spare_frames_are_taken_first_and_leave_for_another_layout():
    small, large = two_pools(4)
    capacity = small.capacity
    frames = [small.arena.untouched(), small.arena.untouched()]
    assert small.arena.untouched() is None, "a quarter of the capacity"
    stride = small.arena.stride
    assert 2 * stride == capacity.spare_bytes == capacity.kept_bytes
    assert frames[:1] == write(small, prompt(1, 1))
    for pool in (small, large):
        pool.check()
    assert small.arena.untouched() is not None
    assert 3 == len(write(large, prompt(2, 3)))
    assert (1, stride) == (small.residency.host.num_blocks, capacity.spare_bytes)
    for pool in (small, large):
        pool.check()


def test_a_node_touches_frames_ahead_and_gets_on_where_it_cannot(monkeypatch):
    pool, woken = pool_of(40), threading.Event()
    spares = SpareFrames(pool.arena, woken.set)
    spares.start()
    with closing(spares):
        while pool.capacity.spare_bytes < 10 * pool.arena.stride or spares._touching is not None:
            spares.step(is_loading=False)
        assert pool.arena.untouched() is None
        resident = resident_pages(pool)
        assert 10 * pool.arena.stride == resident * mmap.PAGESIZE
        write(pool, prompt(1, 3))
        assert resident == resident_pages(pool), "they had their memory"
        monkeypatch.setattr(spares_module, "populate", lambda *_: False)
        while spares._can_touch:
            spares.step(is_loading=False)
        assert resident == resident_pages(pool)
        pool.check()


def test_a_node_touches_no_frames_while_blocks_load_and_a_moment_longer():
    pool, now = pool_of(40), [10.0]
    spares = SpareFrames(pool.arena, lambda: None, clock_s=lambda: now[0])
    for passed_s, is_loading, touches in (
        (0.0, True, False),
        (spares_module.REST_S - 0.1, False, False),
        (0.2, True, False),
        (spares_module.REST_S, False, True),
    ):
        now[0] += passed_s
        spares.step(is_loading=is_loading)
        assert touches == (spares._touching is not None)


def resident_pages(pool):
    return os.fstat(pool.memory.file).st_blocks * 512 // mmap.PAGESIZE


def test_a_full_disk_takes_no_blocks_of_another_layout():
    """Both wait for their disks, and those of the other are the coldest in memory."""
    capacity = Capacity(16 * frame_stride(LAYOUT))
    tiers = [MemoryTier(2, block_bytes=LAYOUT.nbytes) for _ in range(2)]
    stopped, mover = (SteppedMover(tier, max_jobs=n) for tier, n in zip(tiers, (0, 8), strict=True))
    other, pool = (Pool(create(LAYOUT, 16), capacity, each) for each in (stopped, mover))
    write(other, prompt(1))
    for number in (2, 4):
        write(pool, prompt(number, 2))
        mover.run(8)
        pool.work()
    assert [False] * 3 == tiers[1].held([each.key for each in prompt(1)])
    assert 2 == tiers[1].stats().num_blocks
    for each in (pool, other):
        each.check()
