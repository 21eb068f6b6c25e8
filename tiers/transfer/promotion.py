"""Bringing a prefix up: from disk to host frames on reader threads, from frames to device slots.

Engine thread only; the scheduler opens a ticket for a request that is about to run, advances it
once per step, and hands its blocks to the sequence. Nothing here waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from tiers.blocks.chain import Chain
from tiers.errors import MissReason
from tiers.memory.counters import CacheEvent
from tiers.memory.index import Below, Block, BlockState
from tiers.memory.residency import Residency
from tiers.policy import Use
from tiers.tier import TierName
from tiers.transfer.economy import LoadEconomy
from tiers.transfer.mover import LoadJob, Mover, ProbeJob

BLOCKS_PER_LOAD = 4  # a run this long is one read job, so that readers share a prefix


class Progress(Enum):
    """How far a ticket is."""

    LOADING = auto()  # a probe or a load is under way
    WAITING = auto()  # the next block is being computed or loaded for another request
    NO_ROOM = auto()  # its blocks stand, but not all have a slot
    READY = auto()  # every block it will get is on the device


@dataclass(slots=True, eq=False)
class Ticket:
    """One request's claim on its cached prefix. Invariant: each of `blocks` is pinned once by it.

    `blocks[i]` is block i of the chain, served from `sources[i]`; `stop` says why there is no more.
    One that does not read is for a prompt of which nothing may be taken as it stands.
    """

    chain: Chain
    reads: bool = True
    blocks: list[Block] = field(default_factory=list)
    sources: list[TierName] = field(default_factory=list)
    stop: MissReason = MissReason.ABSENT
    probe: ProbeJob | None = None
    probed: bool = False
    loading: bool = False  # some of its blocks may be loading, or lost by a failed load
    num_on_device: int = 0  # leading blocks known to have a slot


class Promoter:
    """Advances tickets; owns the loads under way."""

    def __init__(self, residency: Residency, mover: Mover | None, economy: LoadEconomy) -> None:
        self._residency = residency
        self._mover = mover
        self._economy = economy
        self._loads: list[tuple[LoadJob, list[Block], Ticket]] = []

    def open(self, chain: Chain) -> Ticket:
        """A ticket holding what stands above the disk now; the disk is asked at once."""
        ticket = Ticket(chain, probed=self._mover is None)
        self._match(ticket)
        self._ask_disk(ticket)
        return ticket

    def advance(self, ticket: Ticket) -> Progress:
        """Take the ticket one step further without waiting for anything."""
        if ticket.loading:
            self._drop_lost(ticket)
            if any(block.state is BlockState.LOADING for block in ticket.blocks):
                self._lift(ticket)
                return Progress.LOADING
            ticket.loading = False
        if ticket.probe is not None:
            if not ticket.probe.done:
                return Progress.LOADING
            self._load(ticket)
            if ticket.loading:
                return Progress.LOADING
        if self._match(ticket):
            return Progress.WAITING
        if self._ask_disk(ticket):
            return Progress.LOADING
        return Progress.READY if self._lift(ticket) else Progress.NO_ROOM

    def close(self, ticket: Ticket, use: Use) -> None:
        """Give up the ticket's pins; loads under way finish and stay in the host tier."""
        for block in reversed(ticket.blocks):
            self._residency.unpin(block, use)
        ticket.blocks.clear()
        ticket.sources.clear()

    def collect(self) -> None:
        """Take in the loads that finished. Once per step, before tickets are advanced."""
        if self._loads:
            self._loads = [load for load in self._loads if not self._collect_one(*load)]

    @property
    def num_loads(self) -> int:
        return len(self._loads)

    def _match(self, ticket: Ticket) -> bool:
        """Pin the blocks that continue the ticket; True where another request makes the next."""
        start = len(ticket.blocks)
        found = self._residency.index.match(ticket.chain, start)
        makes_next = False
        for number, block in enumerate(found):
            if block.state is not BlockState.READY:
                makes_next = True
                del found[number:]
                break
        if found:
            self._residency.pin_run(found)
            ticket.blocks += found
            device, host = TierName.DEVICE, TierName.HOST
            ticket.sources += [host if block.slot is None else device for block in found]
        return makes_next

    def _ask_disk(self, ticket: Ticket) -> bool:
        start, end = len(ticket.blocks), len(ticket.chain.keys)
        if ticket.probed or start == end or self._mover is None:
            return False
        ticket.probed = True
        job = ProbeJob(ticket.chain.block_ids(start, end))
        if not self._mover.submit(job):
            ticket.stop = MissReason.OVERLOADED
            return False
        ticket.probe = job
        return True

    def _load(self, ticket: Ticket) -> None:
        """The probe has answered: start loading what it found, as far as frames go."""
        assert ticket.probe is not None and self._mover is not None
        held, ticket.probe = ticket.probe.held, None
        self._match(ticket)  # others may have loaded or computed some of it meanwhile
        start = len(ticket.blocks)
        layout = self._residency.pool.layout
        end = min(start + held, len(ticket.chain.keys))
        if end <= start:
            return
        num_blocks = end - start
        if not self._economy.worth(num_blocks * layout.block_size, num_blocks * layout.nbytes):
            ticket.stop = MissReason.UNECONOMIC
            return
        while start < end and self._load_run(ticket, start, min(start + BLOCKS_PER_LOAD, end)):
            start += BLOCKS_PER_LOAD

    def _load_run(self, ticket: Ticket, start: int, end: int) -> bool:
        """Submit one read job for blocks [start, end) of the chain; False stops the loading."""
        residency, chain = self._residency, ticket.chain
        assert self._mover is not None
        blocks: list[Block] = []
        for number in range(start, end):
            held = residency.index.get(chain.keys[number])
            if held is not None:
                # Another request brings it up or computes it. Once it stands, the disk is asked
                # again for what follows it.
                ticket.probed = held.identity() != chain.block_id(number)
                break
            frame = residency.take_frame(chain.root)
            if frame is None:
                ticket.stop = MissReason.NO_ROOM
                break
            block = Block()
            block.state = BlockState.LOADING
            residency.index.add(block, chain.block_id(number), number)
            block.busy = 1
            residency.settle_frame(block, frame)
            blocks.append(block)
        if not blocks:
            return False
        frames = [block.frame for block in blocks if block.frame is not None]
        job = LoadJob([block.identity() for block in blocks], frames)
        if not self._mover.submit(job):
            ticket.stop = MissReason.OVERLOADED
            for block in blocks:
                self._lose(block, MissReason.OVERLOADED)
            return False
        self._loads.append((job, blocks, ticket))
        for block in blocks:
            residency.pin(block)
            ticket.blocks.append(block)
            ticket.sources.append(TierName.DISK)
        ticket.loading = True
        return len(blocks) == end - start

    def _collect_one(self, job: LoadJob, blocks: list[Block], ticket: Ticket) -> bool:
        if not job.done:
            return False
        num_loaded, reason, _ = job.loaded
        sources = job.loaded.sources or (TierName.DISK,) * num_loaded
        slowest = TierName.REMOTE if TierName.REMOTE in sources else TierName.DISK
        if slowest is TierName.DISK:
            self._economy.observe_load(num_loaded * self._residency.pool.layout.nbytes, job.seconds)
        else:
            _tell_sources(ticket, blocks[0], sources)
        if num_loaded:
            transfers = self._residency.chronicle.transfers
            transfers.observe(slowest, TierName.HOST, num_loaded, job.seconds)
        for number, block in enumerate(blocks):
            if number < num_loaded:
                block.state = BlockState.READY
                on_disk = sources[number] is TierName.DISK
                block.below = Below.HELD_USED if on_disk else Below.ABSENT
                block.hits += 1
                self._residency.mark_idle(block)
                if block.key is None:
                    continue  # a purge took it out while it loaded
                self._residency.entered(block)
                self._residency.count(sources[number], CacheEvent.PROMOTED)
                self._residency.chronicle.came(block, TierName.HOST, sources[number])
            else:
                self._lose(block, reason if number == num_loaded and reason else MissReason.ABSENT)
        return True

    def _lose(self, block: Block, reason: MissReason) -> None:
        """A load failed: the block leaves the index; its tickets drop it when they look."""
        block.state = BlockState.LOST
        block.fault = reason
        block.busy = 0
        self._residency.free_frame(block)
        if block.key is not None:  # a purge takes blocks out while they load
            self._residency.index.remove(block)

    def _drop_lost(self, ticket: Ticket) -> None:
        """Shorten the ticket to before the first block whose load failed."""
        for number, block in enumerate(ticket.blocks):
            if block.state is BlockState.LOST:
                ticket.stop = block.fault or MissReason.ABSENT
                for lost in reversed(ticket.blocks[number:]):
                    self._residency.unpin(lost, lost.use)
                del ticket.blocks[number:], ticket.sources[number:]
                return

    def _lift(self, ticket: Ticket) -> bool:
        """Copy leading blocks from host frames to the device; True when all have a slot."""
        residency = self._residency
        lifted: list[Block] = []
        number = ticket.num_on_device = min(ticket.num_on_device, len(ticket.blocks))
        for block in ticket.blocks[number:]:
            if block.slot is None:
                ready = block.state is BlockState.READY
                if not ready or residency.take_slot(block, block.scope) is None:
                    break
                lifted.append(block)
            ticket.num_on_device += 1
        if lifted:
            frames = [block.frame for block in lifted if block.frame is not None]
            residency.lift(lifted, frames)
        return ticket.num_on_device == len(ticket.blocks)


def _tell_sources(ticket: Ticket, first: Block, sources: Sequence[TierName]) -> None:
    """What was expected from disk came from elsewhere: the ticket is billed by that."""
    if first in ticket.blocks:
        start = ticket.blocks.index(first)
        ticket.sources[start : start + len(sources)] = sources
