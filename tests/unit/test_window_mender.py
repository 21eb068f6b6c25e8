"""The windows of blocks that memory holds without them, as two requests want them at once."""

from array import array

from tests.support.caches import cache_of
from tests.support.chain_runner import chain_layout
from tests.support.faulty_storage import take
from tests.support.memory_tier import MemoryTier, SteppedMover
from tests.unit.test_pins_kept import ROOT
from tiers.blocks.chain import Chain
from tiers.blocks.frames import FrameArena
from tiers.transfer.ticket import Progress, Ticket

BLOCK = 4
LAYOUT = chain_layout(BLOCK, window=6)  # two blocks


def chain(num_blocks: int) -> Chain:
    return Chain(ROOT, array("i", range(num_blocks * BLOCK + 1)), BLOCK)


class House:
    """A disk that holds eight blocks, and a memory that has them all but the windows of six."""

    def __init__(self) -> None:
        sizes = {"block_bytes": LAYOUT.nbytes, "lasting_bytes": LAYOUT.lasting_nbytes}
        self.tier = MemoryTier(20, **sizes)
        frames = take(FrameArena(LAYOUT, 8), 8)
        for number, frame in enumerate(frames):
            frame.buffer[:] = bytes([number]) * LAYOUT.nbytes
        self.tier.store(chain(8).block_ids(0, 8), frames)
        self.mover = SteppedMover(self.tier, fail_rate=0.0)
        self.cache = cache_of(LAYOUT, 20, 20, disk=self.tier, mover=self.mover)
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
