"""One group of layers in all tiers: its blocks in memory, their moves, and those below.

`tiers.cache.TieredCache` is the group of tokens, and has another one for the checkpoints of
recurrent states. Engine thread only.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tiers.blocks.chain import Chain
from tiers.blocks.frames import FrameArena, frame_stride
from tiers.blocks.layout import BlockLayout
from tiers.blocks.lazy_memory import LazyMemory
from tiers.errors import ConfigurationError, mib
from tiers.memory.block import Block
from tiers.memory.device import DevicePool, slot_nbytes
from tiers.memory.index import BlockIndex
from tiers.memory.lru import order_of
from tiers.memory.residency import Residency
from tiers.memory.tails import TailSharing
from tiers.operations.operations import TierOperations
from tiers.policy.admission import WritePolicy, keeps_copies
from tiers.policy.policy import Policy, Use
from tiers.policy.quota import Quotas, QuotaShares
from tiers.steady_clock import SteadyClock
from tiers.tables import BlockTables
from tiers.telemetry.events import EventStream
from tiers.tier import MEMORY, ManagedTier, TierName, TierStats
from tiers.transfer.demotion import Demoter, DemotionSettings
from tiers.transfer.economy import LoadEconomy
from tiers.transfer.mover import Job, Mover
from tiers.transfer.promotion import Promoter
from tiers.transfer.ticket import Progress, Ticket

logger = logging.getLogger(__name__)

GHOSTS_PER_BLOCK = 4  # keys that second-hit admission remembers per block on disk ...
MAX_GHOSTS = 1 << 18  # ... and in total, 40 MB
MIN_STATE_FRAMES = 2  # of checkpoints, which are loaded one at a time
CHECKPOINT_SHARE = 1 / 4  # of each tier, for the checkpoints of a model with recurrent states
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


class CacheGroup:
    """Device, host and disk as one cache of the parts that a group of layers needs."""

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
        checkpoints: TierOperations | None = None,
    ) -> None:
        """`shares` are the quotas of groups of scopes. Pins are stored in `pin_folder`. Operations
        on the blocks include those on their `checkpoints`."""
        self.layout = layout
        self.settings = settings
        self.index = BlockIndex()
        self.pool = DevicePool(layout, _num_slots(layout, settings), device)
        self.economy = LoadEconomy(enabled=settings.weigh_loads)
        self.disk = disk  # its own view of its contents is read, too
        self._levels = disk.levels() if disk is not None else ()
        self._mover = Mover(disk) if mover is None and disk is not None else mover
        self._frames: FrameArena | None = None
        if settings.host_bytes or disk is not None:
            self._frames = FrameArena(layout, _num_frames(layout, settings, device), device)
        capacities = _capacities(self.pool, self._frames, disk)
        quotas = _quotas(shares, capacities, layout.nbytes)
        self.residency = self._residency(capacities, quotas, stream)
        self._promoter = Promoter(self.residency, self._mover, self.economy)
        self._demoter = Demoter(self.residency, self._mover, _demotion(settings, capacities))
        # A state belongs to the end of its block, so no prefix can resume in the middle.
        share_tails = settings.share_tails and not layout.has_states and not layout.states
        self._tails = TailSharing(self.residency, enabled=share_tails)
        self.operations = TierOperations(
            self.residency,
            self._demoter,
            self._mover,
            disk,
            capacities=capacities,
            quotas=quotas,
            pinned_share=settings.pinned_share,
            pin_folder=pin_folder,
            wall_clock=wall_clock or SteadyClock(),
            checkpoints=checkpoints,
        )
        if disk is not None:
            self.residency.evictor.on_left_host = self._left_host
        self.tables = BlockTables(self.residency, self._tails, self._demoter)

    def _residency(
        self,
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
            self._frames,
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

    def start(self, on_load: Callable[[], None] = lambda: None) -> None:
        """Starts the disk threads. They call `on_load`, which wakes an idle engine, after a job."""
        if self._mover is not None:
            self._mover.set_on_done(on_load)
            self._mover.start()

    def lazy_memories(self) -> list[LazyMemory]:
        """The memory that can be touched ahead of need."""
        found = [self.pool.lazy_memory] if self.pool.lazy_memory is not None else []
        if self._frames is not None and not self._frames.num_pinned_bytes:
            found.append(self._frames.lazy_memory)
        return found

    def close(self, *, flush: bool = True) -> int:
        """Flushes and closes the tiers and ends their threads. Returns how many blocks are lost."""
        unsaved = self._demoter.flush() if flush else 0
        if self._mover is not None:
            self._mover.close()
        if self.disk is not None:
            self.disk.close()
        return unsaved

    def open(self, chain: Chain) -> Ticket:
        """Holds the cached part of the chain's prefix and asks the disk for the rest."""
        return self._promoter.open(chain)

    def advance(self, ticket: Ticket) -> Progress:
        """Advances the ticket by one step. When READY, all of its blocks are on the device."""
        return self._promoter.advance(ticket)

    def submit(self, job: Job) -> bool:
        """Ask the tiers below memory. False if there are none, or they are overloaded."""
        return self._mover is not None and self._mover.submit(job)

    def close_ticket(self, ticket: Ticket) -> None:
        """Releases the ticket's blocks; its request does not run for now."""
        self._promoter.close(ticket, Use(time.monotonic(), ticket.chain.root))

    def step(self) -> None:
        """Takes in finished loads and does one step's share of demotion and cleanup."""
        self._promoter.collect()
        self._demoter.step()
        self.operations.step()
        if self.disk is not None:
            self.disk.paced(self.economy.prefill_tokens_per_s if self.economy.enabled else 0.0)

    def flush(self, deadline_s: float = 60.0) -> int:
        """Writes every full block to disk and waits. Returns how many could not be written."""
        return self._demoter.flush(deadline_s)

    @property
    def is_moving(self) -> bool:
        """Whether loads or stores are in progress, so that an idle engine should check again."""
        return (
            self._promoter.num_loads > 0
            or self.pool.is_arriving
            or self._demoter.num_stores > 0
            or self.operations.purger.is_active
            or self.operations.evictions.is_active
        )

    def tier_stats(self) -> tuple[TierStats, ...]:
        """Device, host and the tiers below."""
        counters, num_device = self.residency.counters, self.pool.num_blocks - self.pool.num_free
        num_frames = self._frames.num_frames if self._frames is not None else 0
        num_used = num_frames - (self._frames.num_free if self._frames is not None else 0)
        num_slots = self.pool.places.num_taken
        return (
            counters.stats(TierName.DEVICE, num_slots, self.pool.num_blocks, num_device),
            counters.stats(TierName.HOST, self.residency.host.num_blocks, num_frames, num_used),
            *(level.stats() for level in self._levels),
        )


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
    num_frames = frames.num_frames if frames is not None else 0
    sizes = {TierName.DEVICE: pool.num_blocks, TierName.HOST: num_frames}
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
