"""The engine's face of the tiers: its calls to the cache, in their order.

    open ─► advance ... ─► tables: plan ─► provide, commit as blocks fill ─► release
    (ticket: match, load, lift)     (the blocks of a running sequence)      (evictable from here on)

Engine thread only, except that any thread may read `CacheStats` snapshots. Nothing here waits for a
disk. A fault in a lower tier shortens the match found by `advance`; it never raises.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tiers.blocks.chain import Chain
from tiers.blocks.frames import FrameArena, frame_stride
from tiers.blocks.keys import PrefixKey
from tiers.blocks.layout import BlockLayout
from tiers.blocks.lazy_memory import AHEAD_BYTES, LazyMemory
from tiers.checkpoints import Checkpoints
from tiers.errors import ConfigurationError, MissReason, mib
from tiers.memory.block import Block
from tiers.memory.device import DevicePool, slot_nbytes
from tiers.memory.index import BlockIndex
from tiers.memory.lru import order_of
from tiers.memory.residency import Residency
from tiers.memory.tails import Tail, TailCase, TailSharing
from tiers.operations.operations import TierOperations
from tiers.policy.admission import WritePolicy, keeps_copies
from tiers.policy.policy import Policy, Use
from tiers.policy.quota import Quotas, QuotaShares
from tiers.remote.stacked import PUBLISH_HITS
from tiers.stats import CacheStats
from tiers.steady_clock import SteadyClock
from tiers.tables import BlockTables
from tiers.telemetry.events import EventStream
from tiers.telemetry.misses import Absence, marks_of
from tiers.tier import MEMORY, ManagedTier, TierName
from tiers.transfer.demotion import Demoter, DemotionSettings
from tiers.transfer.economy import LoadEconomy
from tiers.transfer.mover import Job, Mover
from tiers.transfer.promotion import Promoter
from tiers.transfer.ticket import Progress, Ticket, TicketState
from tiers.transfer.toucher import Toucher

logger = logging.getLogger(__name__)

GHOSTS_PER_BLOCK = 4  # keys that second-hit admission remembers per block on disk ...
MAX_GHOSTS = 1 << 18  # ... and in total, 40 MB
MIN_STATE_FRAMES = 2  # of checkpoints, which are loaded one at a time
CHECKPOINT_SHARE = 1 / 4  # of each tier, for the checkpoints of a model with recurrent states
MIN_SLOTS = 4  # of checkpoints
MIN_FRAMES = 16  # a smaller host tier could not hold a load and a store at once


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """Sizes in bytes. Above a disk the host has its least frames, whatever its size."""

    device_bytes: int
    host_bytes: int
    write_policy: WritePolicy = WritePolicy.ON_EVICT
    ahead: float = 1 / 16
    share_tails: bool = True
    weigh_loads: bool = True  # load from disk only if that is faster than computing
    pinned_share: float = 1 / 4  # share of the lowest tier for pins
    checkpoint_share: float = CHECKPOINT_SHARE  # of each memory tier


class TieredCache:
    """Device, host and disk as one cache of blocks keyed by prefix.

    `operations` is what operators ask of it; see `tiers.operations.face`.
    """

    def __init__(
        self,
        layout: BlockLayout,
        settings: CacheSettings,
        *,
        device: str = "cpu",
        disk: ManagedTier | None = None,
        mover: Mover | None = None,
        stream: EventStream | None = None,
        shares: QuotaShares | None = None,
        pin_folder: Path | None = None,
        wall_clock: Callable[[], float] | None = None,
        checkpoint_disk: ManagedTier | None = None,
        checkpoint_mover: Mover | None = None,
    ) -> None:
        """`shares` are the quotas of groups of scopes. Pins are stored in `pin_folder`. A layout
        with recurrent states has a second group of parts, with a disk of its own."""
        self.group: TieredCache | None = None
        if layout.states:
            settings, own = _divided(layout, settings)
            self.group = TieredCache(
                layout.checkpoint,
                own,
                device=device,
                disk=checkpoint_disk,
                mover=checkpoint_mover,
                shares=shares,
                wall_clock=wall_clock,
            )
        self.layout = layout
        self.settings = settings
        self.index = BlockIndex()
        self.pool = DevicePool(layout, _num_slots(layout, settings), device)
        self.economy = LoadEconomy(enabled=settings.weigh_loads)
        self.disk = disk  # its own view of its contents is read, too
        self._levels = disk.levels() if disk is not None else ()
        if mover is None and disk is not None:
            mover = Mover(disk)
        self._mover = mover
        frames = None
        if settings.host_bytes or disk is not None:
            frames = FrameArena(layout, _num_frames(layout, settings, device), device)
        self._frames = frames
        self._toucher: Toucher | None = None  # until `touch`
        capacities = _capacities(self.pool, frames, disk)
        quotas = _quotas(shares, capacities, layout.nbytes)
        self.residency = self._residency(frames, capacities, quotas, stream)
        self._promoter = Promoter(self.residency, self._mover, self.economy)
        self._demoter = Demoter(self.residency, self._mover, _demotion(settings, capacities))
        # A state belongs to the end of its block, so no prefix can resume in the middle.
        share_tails = settings.share_tails and not layout.has_states and not layout.states
        self._tails = TailSharing(self.residency, enabled=share_tails)
        self.checkpoints: Checkpoints | None = None
        if self.group is not None:
            self.checkpoints = Checkpoints(self.group, self.residency, self._promoter)
        self.operations: TierOperations = TierOperations(
            self.residency,
            self._demoter,
            self._mover,
            disk,
            capacities=capacities,
            quotas=quotas,
            pinned_share=settings.pinned_share,
            pin_folder=pin_folder,
            wall_clock=wall_clock or SteadyClock(),
            checkpoints=self.group.operations if self.group is not None else None,
        )
        if disk is not None:
            self.residency.evictor.on_left_host = self._left_host
        self.tables = BlockTables(
            self.residency, self._tails, self._demoter, self.operations.traffic
        )

    def _residency(
        self,
        frames: FrameArena | None,
        capacities: Mapping[TierName, int],
        quotas: Mapping[TierName, Quotas],
        stream: EventStream | None,
    ) -> Residency:
        def order(tier: TierName) -> Policy[Block]:
            return order_of(tier, capacities.get(tier, 1), quotas.get(tier))

        keeps = keeps_copies(self.pool.num_blocks, sum(capacities.values()))
        return Residency(
            self.index,
            self.pool,
            frames,
            order(TierName.DEVICE),
            order(TierName.HOST),
            stream,
            # If windows are omitted, an upper copy cannot replace the lower one.
            host_moves=not keeps and not self.layout.reach,
            quotas=quotas,
        )

    def _left_host(self, block: Block) -> None:
        if self.disk is not None and block.key is not None:
            idle_s = block.idle_s(time.monotonic())
            self.disk.demoted([block.key], [idle_s], [block.use.windows])

    @property
    def checkpoint_pool(self) -> DevicePool | None:
        """The checkpoints on the device, for a layout with recurrent states."""
        return self.group.pool if self.group is not None else None

    @property
    def is_shared(self) -> bool:
        return self.disk is not None and self.disk.is_shared

    @property
    def stream(self) -> EventStream:
        return self.residency.counters.stream

    def start(self, on_load: Callable[[], None] = lambda: None) -> None:
        """Starts the disk threads. They call `on_load`, which wakes an idle engine, after a job."""
        if self._mover is not None:
            self._mover.set_on_done(on_load)
            self._mover.start()
            self.operations.start()
        if self.group is not None:
            self.group.start(on_load)

    def touch(self, others: Sequence[LazyMemory] = (), *, taken: LazyMemory | None = None) -> None:
        """Begins to touch memory before requests do, here and in `others`, in a thread of its
        own. What of `taken` is touched already becomes theirs, and the rest is given back."""
        lazy_memories = [*self._lazy_memories(), *others]
        if taken is not None:
            for lazy in lazy_memories:
                lazy.adopt(taken, AHEAD_BYTES)
            taken.give_back()
        self._toucher = Toucher(lazy_memories)
        self._toucher.start()

    def warm_up(self) -> None:
        """Waits for the memory of the first prompts. Call it before any block is used."""
        if self._toucher is not None:
            self._toucher.wait()

    def _lazy_memories(self) -> list[LazyMemory]:
        lazy_memories = self.group._lazy_memories() if self.group is not None else []
        if self.pool.lazy_memory is not None:
            lazy_memories.append(self.pool.lazy_memory)
        if self._frames is not None and not self._frames.num_pinned_bytes:
            lazy_memories.append(self._frames.lazy_memory)
        return lazy_memories

    def close(self, *, flush: bool = True) -> int:
        """Flushes and closes the tiers and ends their threads. Returns how many blocks are lost."""
        unsaved = self._demoter.flush() if flush else 0
        if self._toucher is not None:
            self._toucher.close()
        if self._mover is not None:
            self._mover.close()
        if self.disk is not None:
            self.disk.close()
        if self.group is not None:
            unsaved += self.group.close(flush=flush)
        return unsaved

    # A request's prefix: ticket by ticket.

    def peek(self, chain: Chain) -> int:
        """The number of leading tokens above the disk now. Pins nothing."""
        if self.checkpoints is not None:
            return self.checkpoints.peek(chain)
        return len(self.index.match(chain)) * self.layout.block_size

    def open(self, chain: Chain, *, reads: bool = True) -> Ticket:
        """Pins the cached part of the chain's prefix and asks the disk for the rest. A private
        chain, or one not to be read, gets an empty ticket."""
        if chain.root in self.operations.blocked:
            chain.private = True
        if chain.private or not reads:
            return Ticket(chain, TicketState.BYPASSED, stop=MissReason.DISABLED)
        self.operations.traffic.asked(chain.keys)
        if self.checkpoints is not None:
            return self.checkpoints.open(chain)
        ticket = self._promoter.open(chain)
        if self.disk is not None and self.disk.is_shared:
            few = [block for block in ticket.blocks if block.hits <= PUBLISH_HITS]
            self.disk.used([block.key for block in few if block.key is not None])
        return ticket

    def advance(self, ticket: Ticket) -> Progress:
        """Advances the ticket by one step. When READY, all of its blocks are on the device."""
        if not ticket.reads:
            return Progress.READY
        if ticket.resume is not None and self.checkpoints is not None:
            return self.checkpoints.advance(ticket)
        return self._promoter.advance(ticket)

    def submit(self, job: Job) -> bool:
        """Ask the tiers below memory. False if there are none, or they are overloaded."""
        return self._mover is not None and self._mover.submit(job)

    def close_ticket(self, ticket: Ticket) -> None:
        """Releases the ticket's blocks; its request does not run for now."""
        if self.checkpoints is not None:
            self.checkpoints.close(ticket)
        chain = ticket.chain
        self._promoter.close(ticket, Use(time.monotonic(), chain.root))

    @property
    def num_allocatable(self) -> int:
        """The number of blocks for which `tables.provide` could find slots now."""
        return self.residency.device.num_allocatable

    @property
    def num_moved(self) -> int:
        """Counts up when blocks in use get other slots."""
        return self.residency.device_room.num_moved

    def find_tail(self, ticket: Ticket) -> Tail | None:
        """A block that begins with the tokens after the ticket's last block; see `tails`."""
        if not ticket.reads or len(ticket.blocks) == ticket.chain.num_blocks:
            return None
        return self._tails.find(ticket.chain, len(ticket.blocks))

    def explain(self, chain: Chain, number: int, tail: Tail | None) -> Absence:
        """Why block `number` of the chain was not found. `tail` is the result of `find_tail`."""
        wanted = chain.chunks[number] if number < len(chain.chunks) else chain.tail
        key = chain.keys[number] if number < len(chain.keys) else None
        if tail is None and not self.settings.share_tails:
            tail = self._tails.nearest(chain, number)
        # An extended block has the new prompt's tokens by now, and had no others.
        parted = (
            tail is not None
            and tail.case is not TailCase.EXTEND
            and tail.num_rows < tail.block.num_tokens
        )
        return Absence(
            parent=chain.parent(number),
            key=key,
            departure=self.residency.evictor.evicted_keys.find(key) if key is not None else None,
            rows=tail.num_rows if tail is not None else 0,
            parted=parted,
            sibling=tail.block.key if tail is not None and parted else None,
            marks=marks_of(wanted, self.operations.mark_seed),
        )

    # Housekeeping and observation.

    def step(self) -> None:
        """Takes in finished loads and does one step's share of demotion and cleanup."""
        if self._toucher is not None:
            self._toucher.step()
        self._promoter.collect()
        self._demoter.step()
        self.operations.step()
        if self.group is not None:
            self.group.step()
        if self.disk is not None:
            self.disk.paced(self.economy.prefill_tokens_per_s if self.economy.enabled else 0.0)

    def rest(self) -> None:
        """Take in that nothing is computed or moved until the next step."""
        if self._toucher is not None:
            self._toucher.rest()

    def flush(self, deadline_s: float = 60.0) -> int:
        """Writes every full block to disk and waits. Returns how many could not be written."""
        unsaved = self._demoter.flush(deadline_s)
        return unsaved + (self.group.flush(deadline_s) if self.group is not None else 0)

    @property
    def is_moving(self) -> bool:
        """Whether loads or stores are in progress, so that an idle engine should check again."""
        return (
            self._promoter.num_loads > 0
            or self.pool.is_arriving
            or self._demoter.num_stores > 0
            or self.operations.purger.is_active
            or self.operations.evictions.is_active
            or (self.group is not None and self.group.is_moving)
        )

    def on_purge(self, detach: Callable[[Collection[PrefixKey]], None]) -> None:
        """Sets what makes running requests of some scopes private. The engine calls it."""
        self.operations.purger.detach = detach

    def stats(self) -> CacheStats:
        layout, residency = self.layout, self.residency
        counters, keeper = residency.counters, self.operations.keeper
        num_device = self.pool.num_blocks - self.pool.num_free
        frames = residency.frames
        num_frames = frames.num_frames if frames is not None else 0
        used_frames = num_frames - (frames.num_free if frames is not None else 0)
        states = self.group.stats() if self.group is not None else None
        return CacheStats(
            device=counters.stats(
                TierName.DEVICE, self.pool.places.num_taken, self.pool.num_blocks, num_device
            ),
            host=counters.stats(TierName.HOST, residency.host.num_blocks, num_frames, used_frames),
            below=tuple(level.stats() for level in self._levels),
            checkpoints=(states.device, states.host, *states.below) if states is not None else (),
            events=dict(counters.events),
            transfers=counters.transfers.stats(),
            num_loads=self._promoter.num_loads,
            num_stores=self._demoter.num_stores,
            loads_refused=self.economy.refused,
            collisions=self.index.collisions,
            load_bytes_per_s=self.economy.load_bytes_per_s,
            prefill_tokens_per_s=self.economy.prefill_tokens_per_s,
            num_listeners=self.stream.num_subscribers,
            events_missed=self.stream.num_missed,
            block_bytes=layout.nbytes,
            num_pins=len(keeper.pins()),
            pinned_blocks=keeper.num_blocks,
            pinnable_blocks=keeper.max_blocks,
            groups=self.operations.quotas(),
        )


def _divided(layout: BlockLayout, settings: CacheSettings) -> tuple[CacheSettings, CacheSettings]:
    share, nbytes = settings.checkpoint_share, layout.checkpoint.nbytes
    on_device = max(MIN_SLOTS * nbytes, int(share * settings.device_bytes))
    on_host = int(share * settings.host_bytes)
    blocks = replace(
        settings,
        device_bytes=max(0, settings.device_bytes - on_device),
        host_bytes=settings.host_bytes - on_host,
    )
    # A checkpoint saves all tokens before it, so it always pays to load one.
    own = replace(settings, device_bytes=on_device, host_bytes=on_host, weigh_loads=False)
    return blocks, own


def _num_slots(layout: BlockLayout, settings: CacheSettings) -> int:
    """The blocks that fit on the device. Raises ConfigurationError if they are too few."""
    num_blocks = settings.device_bytes // slot_nbytes(layout)
    if num_blocks < 2:
        raise ConfigurationError(
            f"a device cache of {settings.device_bytes} bytes holds {num_blocks} blocks of "
            f"{layout.nbytes} bytes, and serving needs at least 2; raise --device-cache to "
            f"{2 * slot_nbytes(layout)} or more, or lower --block-size"
        )
    return num_blocks


def _num_frames(layout: BlockLayout, settings: CacheSettings, device: str) -> int:
    """The number of host frames. Says if they take more than the setting."""
    fewest = MIN_STATE_FRAMES if layout.is_checkpoint else MIN_FRAMES
    stride = frame_stride(layout, device)
    if settings.host_bytes < fewest * stride:
        logger.warning(
            f"host cache: {mib(fewest * stride)} are taken instead of {mib(settings.host_bytes)}: "
            f"what moves to and from disk needs room for {fewest} blocks"
        )
    return max(fewest, settings.host_bytes // stride)


def _capacities(
    pool: DevicePool, frames: FrameArena | None, disk: ManagedTier | None
) -> dict[TierName, int]:
    """The capacity of each tier in blocks, hottest first."""
    sizes = {
        TierName.DEVICE: pool.num_blocks,
        TierName.HOST: frames.num_frames if frames is not None else 0,
    }
    for level in disk.levels() if disk is not None else ():
        sizes[level.name] = level.stats().capacity_bytes // pool.layout.nbytes
    return {tier: blocks for tier, blocks in sizes.items() if blocks}


def _quotas(
    shares: QuotaShares | None, capacities: Mapping[TierName, int], block_bytes: int
) -> dict[TierName, Quotas]:
    """The quotas of the memory tiers; the disk has its own."""
    if shares is None:
        return {}
    return {
        tier: Quotas(shares, blocks * block_bytes)
        for tier, blocks in capacities.items()
        if tier in MEMORY
    }


def _demotion(settings: CacheSettings, capacities: Mapping[TierName, int]) -> DemotionSettings:
    below = sum(blocks for tier, blocks in capacities.items() if tier not in MEMORY)
    return DemotionSettings(
        write_policy=settings.write_policy,
        ahead=settings.ahead,
        num_ghosts=min(MAX_GHOSTS, GHOSTS_PER_BLOCK * below),
    )
