"""A request's ticket step by step, and the blocks its sequence is given: what is lifted, waited
for, lost and counted."""

from array import array

import pytest

from tests.support.caches import cache_of
from tests.support.chain_runner import chain_layout
from tests.support.faulty_storage import take
from tests.support.memory_tier import MemoryTier, SteppedMover
from tests.unit.test_pins_kept import BLOCK, LAYOUT, ROOT, Bench
from tiers.blocks.chain import Chain
from tiers.blocks.frames import FrameArena
from tiers.errors import MissReason
from tiers.memory.block import BlockState
from tiers.memory.tails import TailCase
from tiers.policy.quota import QuotaShares
from tiers.telemetry.events import CacheEvent
from tiers.tier import TierName
from tiers.transfer.ticket import Progress, Ticket


@pytest.fixture
def bench() -> Bench:
    return Bench()


def on_disk(bench: Bench, num_blocks: int) -> Chain:
    """A chain that the disk alone has."""
    chain = bench.chain(0, num_blocks)
    frames = take(FrameArena(LAYOUT, num_blocks), num_blocks)
    bench.tier.store(chain.block_ids(0, num_blocks), frames)
    return chain


def probed(bench: Bench, chain: Chain) -> Ticket:
    """A ticket that knows what the disk has, and whose loads are under way."""
    ticket = bench.cache.open(chain)
    bench.mover.run_job(0)
    assert bench.cache.advance(ticket) is Progress.LOADING
    assert bench.cache.stats().num_loads > 0
    return ticket


def test_what_stands_is_lifted_while_the_rest_loads(bench):
    chain = on_disk(bench, 8)
    head = probed(bench, bench.chain(0, 4))
    bench.mover.run_job(0)
    bench.cache.step()
    bench.cache.close_ticket(head)
    ticket = probed(bench, chain)
    assert (bench.cache.advance(ticket), ticket.num_on_device) == (Progress.LOADING, 4)
    bench.mover.run_job(0)
    bench.cache.step()
    assert (bench.cache.advance(ticket), ticket.num_on_device) == (Progress.READY, 8)


def test_a_disk_that_has_no_more_is_not_waited_for_a_step_longer(bench):
    """Loaded up to a block that another request computed, after which nothing follows."""
    on_disk(bench, 3)
    chain = bench.chain(0, 5)
    (computed,) = bench.cache.tables.plan(bench.chain(0, 3), 2)
    ticket = probed(bench, chain)
    bench.mover.run_job(0)
    bench.cache.step()
    bench.cache.tables.provide(computed)
    bench.cache.tables.commit(bench.chain(0, 3), 2, computed)
    assert bench.cache.advance(ticket) is Progress.LOADING  # asks the disk for what follows
    bench.mover.run_job(0)
    assert (bench.cache.advance(ticket), len(ticket.blocks)) == (Progress.READY, 3)


def test_a_disk_too_busy_to_be_asked_is_said_to_be():
    tier = MemoryTier(8)
    cache = cache_of(LAYOUT, 8, 8, disk=tier, mover=SteppedMover(tier, max_jobs=0))
    ticket = cache.open(Bench().chain(0, 2))
    assert (cache.advance(ticket), ticket.stop) == (Progress.READY, MissReason.OVERLOADED)


def test_what_came_from_the_disk_is_not_written_there_again(bench):
    chain = on_disk(bench, 4)
    probed(bench, chain)
    bench.mover.run_job(0)
    bench.cache.step()
    assert bench.cache.stats().events[TierName.DISK, CacheEvent.PROMOTED] == 4
    assert bench.cache.flush(deadline_s=0.01) == 0
    assert bench.mover.num_jobs == 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_purge_takes_blocks_that_are_loading(bench, fails):
    """Their load ends, with or without success, and nothing of them is reported or kept."""
    chain = on_disk(bench, 4)
    ticket = probed(bench, chain)
    bench.cache.on_purge(lambda roots: bench.cache.close_ticket(ticket))
    purged = bench.cache.operations.purge([ROOT])
    assert not purged.done()
    bench.mover.run_job(0, fails=fails)
    bench.settle()
    assert purged.result(0).num_left == 0
    assert not any(bench.stands(chain))
    stats = bench.cache.stats()
    assert TierName.HOST not in {tier for tier, _ in stats.events}
    assert (TierName.DISK, CacheEvent.PROMOTED) not in stats.events
    assert stats.events[TierName.DISK, CacheEvent.PURGED] == 4
    assert stats.host.num_blocks == 0


def test_a_full_block_is_not_merged_into_one_still_computing(bench):
    """Two requests compute the same tokens: the first to be done keeps what it has."""
    tables = bench.cache.tables
    first, second = bench.chain(0, 1), bench.chain(0, 1)
    (announced,) = tables.plan(first, 0)
    (block,) = tables.plan(second, 0)
    tables.provide(announced)
    tables.provide(block)
    assert tables.commit(second, 0, block) is block
    assert announced.state is BlockState.COMPUTING
    assert tables.commit(first, 0, announced) is announced
    assert bench.cache.index.get(first.keys[0]) is announced


def test_an_extended_tail_is_not_merged_into_a_block_that_has_left_the_device(bench):
    """It fills while another with its tokens is committed, ends, and is evicted to the host."""
    cache, tables = bench.cache, bench.cache.tables
    short = Chain(ROOT, range(2), BLOCK)
    [block] = tables.plan(short, 0)
    tables.provide(block)
    tables.release(short, [block], 2)
    chain = Chain(ROOT, range(3), BLOCK)
    tail = cache.find_tail(cache.open(chain))
    assert tail is not None and tail.case is TailCase.EXTEND
    extended = tables.adopt_tail(tail, chain, 0)
    assert extended is block
    chain.append(3)
    bench.compute(bench.chain(0, 1))
    held = cache.index.get(chain.keys[0])
    assert held is not None and cache.residency.evictor.demote(held)
    cache.residency.evict_device(held)
    assert tables.commit(chain, 0, extended) is extended
    tables.release(chain, [extended], 4)
    bench.settle()
    cache.residency.check()
    assert [held] == list(cache.index) and 1 == bench.serve(chain)


def test_a_block_being_computed_counts_against_its_tenant_s_quota():
    shares = QuotaShares(10, {"acme": 4}, owner_of={ROOT: "acme"}.get)
    cache = cache_of(LAYOUT, 10, shares=shares)
    for block in cache.tables.plan(Bench().chain(0, 3), 0):
        cache.tables.provide(block)
    used = {(use.group, use.used_bytes) for use in cache.operations.quotas()}
    assert used == {("acme", 3 * LAYOUT.nbytes), (None, 0)}


WINDOWED = chain_layout(BLOCK, window=6)  # two blocks


def chain(num_blocks: int) -> Chain:
    return Chain(ROOT, array("i", range(num_blocks * BLOCK + 1)), BLOCK)


class House:
    """A disk that holds eight blocks, and a memory that has them all but the windows of six."""

    def __init__(self) -> None:
        sizes = {"block_bytes": WINDOWED.nbytes, "lasting_bytes": WINDOWED.lasting_nbytes}
        self.tier = MemoryTier(20, **sizes)
        frames = take(FrameArena(WINDOWED, 8), 8)
        for number, frame in enumerate(frames):
            frame.buffer[:] = bytes([number]) * WINDOWED.nbytes
        self.tier.store(chain(8).block_ids(0, 8), frames)
        self.mover = SteppedMover(self.tier, fail_rate=0.0)
        self.cache = cache_of(WINDOWED, 20, 20, disk=self.tier, mover=self.mover)
        long = self.cache.open(chain(8))
        self.settle(long)
        self.cache.close_ticket(long)

    def settle(self, ticket: Ticket) -> None:
        while self.cache.advance(ticket) is not Progress.READY:
            self.mover.run(1000)
            self.cache.step()

    def reading(self, num_blocks: int) -> Ticket:
        """A ticket for a prefix, that has asked for its last windows."""
        ticket = self.cache.open(chain(num_blocks))
        assert self.cache.advance(ticket) is Progress.LOADING
        self.mover.run_job(self.mover.num_jobs - 1)  # which windows are below?
        assert self.cache.advance(ticket) is Progress.LOADING
        return ticket


def test_windows_are_read_once_for_two_requests_and_not_served_if_that_fails():
    """The other prefix is cut to the end of this one once it knows which windows are below."""
    house = House()
    first = house.reading(2)
    assert 1 == house.mover.num_jobs
    lost = chain(8).keys[2:5]
    house.tier._without_windows.update(lost)
    second = house.reading(5)
    assert 1 == house.mover.num_jobs
    house.mover.run_job(0, fails=True)
    house.cache.step()
    for ticket in (first, second):
        house.settle(ticket)
        assert [] == ticket.blocks


def test_a_block_takes_no_frame_from_one_whose_windows_are_read_with_its_own():
    """The host has room for one of the two blocks whose windows are missing."""
    house = House()
    residency = house.cache.residency
    first, *others = (house.cache.index.get(key) for key in chain(8).keys)
    assert residency.host_room.widen(first, ())
    for block in others:
        residency.evict_host(block)
    while residency.frames.take() or residency.frames.take(lesser=True):
        pass
    ticket = house.cache.open(chain(2))
    house.settle(ticket)
    assert first.frame is not None and [] == ticket.blocks
