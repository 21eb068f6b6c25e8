"""Who gives up a frame or windows for another block, and what is said of a block that leaves."""

import pytest

from tests.support.caches import cache_of
from tests.support.chain_runner import chain_layout
from tiers.blocks.chain import Chain
from tiers.blocks.keys import CacheScope
from tiers.blocks.part import Part
from tiers.memory.block import Below, Block, BlockState, HostState
from tiers.memory.residency import Residency
from tiers.memory.write_queue import WriteQueue
from tiers.policy.policy import Use
from tiers.telemetry.events import CacheEvent
from tiers.tier import TierName

SIZE = 4
NUM_FRAMES = 16
ROOT = CacheScope(tenant=b"room").root()
CHAIN = Chain(ROOT, list(range(2 * SIZE)), SIZE)


@pytest.fixture
def residency() -> Residency:
    return cache_of(chain_layout(SIZE, window=6, windowed=3), 2, NUM_FRAMES).residency


def on_host(residency: Residency, number: int, use: Use, *, lesser: bool = False) -> Block:
    block, frame = Block(0.0), residency.take_frame(None, lesser=lesser)
    residency.index.add(block, CHAIN, number)
    block.state, block.use = BlockState.READY, use
    residency.settle_frame(block, frame)
    return block


def full(residency: Residency) -> tuple[Block, Block]:
    """Two blocks on a host without a free frame. The second's last use needed no windows."""
    colder = on_host(residency, 0, Use(1.0, ROOT))
    passed = on_host(residency, 1, Use(2.0, ROOT, windows=False))
    for _ in range(NUM_FRAMES - 2):
        assert residency.take_frame(None) is not None
    return colder, passed


@pytest.mark.parametrize(
    ("below", "spares", "leave"),
    [(False, False, True), (True, False, False), (False, True, False)],
    ids=["that no use needed", "that a tier below lacks", "of blocks to spare"],
)
def test_windows_leave_the_host_before_any_block_or_stay(residency, below, spares, leave):
    residency.host.has_below = below
    colder, passed = full(residency)
    assert residency.take_frame(None, [passed] if spares else (), lesser=True) is not None
    assert leave == (colder.frame is not None)
    assert passed.frame is not None
    assert passed.frame.part is (Part.LASTING if leave else Part.WHOLE)


def test_windows_of_a_block_that_is_used_again_stay_on_the_device(residency):
    used, other = blocks = [Block(0.0), Block(0.0)]
    for number, block in enumerate(blocks):
        residency.index.add(block, CHAIN, number)
        block.state, block.ref_count = BlockState.READY, 1
        residency.take_slot(block, None)
        residency.release(block, Use(1.0, ROOT, windows=block is other))
        residency.device.passed.sync(block)
    residency.acquire(used)
    assert residency.take_slot(Block(0.0), None, lesser=True) is not None
    assert used.slot_whole and other.slot is None


def test_a_frame_that_is_written_or_copied_stays_where_it_is(residency):
    block = on_host(residency, 0, Use(1.0, ROOT), lesser=True)
    frame = block.frame
    block.busy = 1
    assert not residency.host_room.widen(block, ()) and frame is block.frame
    block.busy = 0
    assert residency.host_room.widen(block, ())
    assert block.frame is not None and not block.frame.is_lesser


def test_blocks_that_a_tier_below_has_are_told_to_it_as_they_leave(residency):
    told: list[Block] = []
    residency.evictor.on_left_host = told.append
    held, lacking = (on_host(residency, number, Use(1.0, ROOT)) for number in range(2))
    held.below = Below.HELD
    residency.evict_host(lacking)
    residency.evict_host(held)
    assert [held] == told


def test_a_pinned_block_that_is_lost_is_never_said_to_be_skipped(residency):
    lost: list[Block] = []
    evictor = residency.evictor
    evictor.skips, evictor.on_lost = lambda block: True, lost.append
    pinned, other = (on_host(residency, number, Use(1.0, ROOT)) for number in range(2))
    pinned.pinned = True
    residency.host.sync(pinned)
    for block in (pinned, other):
        residency.evict_host(block)
    events = residency.counters.events
    assert [pinned] == lost
    assert 1 == events[TierName.HOST, CacheEvent.LOST]
    assert 1 == events[TierName.HOST, CacheEvent.SKIPPED]


@pytest.mark.parametrize(("worth", "host"), [(False, "EVICTABLE"), (True, "IN_USE")])
def test_a_block_that_is_not_worth_it_or_not_idle_no_longer_waits_to_be_written(worth, host):
    queue, block = WriteQueue(), Block(0.0)
    for queue.worth, block.host, waits in (
        (lambda _: True, HostState.EVICTABLE, True),
        (lambda _: worth, HostState[host], False),
    ):
        queue.sync(block)
        assert waits == (block in queue) == (block.below is Below.WAITING)
