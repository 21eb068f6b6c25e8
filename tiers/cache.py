"""The engine's face of the tiers: its calls to the cache, in their order.

    open ─► advance ... ─► tables: plan ─► provide, commit as blocks fill ─► release
    (ticket: match, load, lift)     (the blocks of a running sequence)      (evictable from here on)

Engine thread only, except that any thread may read `CacheStats` snapshots. Nothing here waits for a
disk. A fault in a lower tier shortens the match found by `advance`; it never raises.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from tiers.blocks.chain import Chain
from tiers.blocks.keys import PrefixKey
from tiers.blocks.layout import BlockLayout
from tiers.blocks.lazy_memory import LazyMemory
from tiers.checkpoints import Checkpoints
from tiers.errors import MissReason
from tiers.group import CHECKPOINT_SHARE, CacheGroup, CacheSettings
from tiers.memory.device import DevicePool
from tiers.memory.tails import Tail, TailCase
from tiers.policy.quota import QuotaShares
from tiers.remote.stacked import PUBLISH_HITS
from tiers.stats import CacheStats
from tiers.telemetry.events import EventStream
from tiers.telemetry.misses import Absence, marks_of
from tiers.tier import ManagedTier
from tiers.transfer.mover import Mover
from tiers.transfer.ticket import Progress, Ticket, TicketState
from tiers.transfer.toucher import Toucher

__all__ = ["CHECKPOINT_SHARE", "CacheSettings", "TieredCache"]

MIN_SLOTS = 4  # of checkpoints


class TieredCache(CacheGroup):
    """Device, host and disk as one cache of blocks keyed by prefix, with their checkpoints.
    `operations` is what operators ask of it; see `tiers.operations.face`."""

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
        """As for a `CacheGroup`. A layout with recurrent states has a second group of parts, with a
        disk of its own."""
        self.group: CacheGroup | None = None
        if layout.states:
            settings, own = _divided(layout, settings)
            self.group = CacheGroup(
                layout.checkpoint,
                own,
                device=device,
                disk=checkpoint_disk,
                mover=checkpoint_mover,
                shares=shares,
                wall_clock=wall_clock,
            )
        super().__init__(
            layout,
            settings,
            device=device,
            disk=disk,
            mover=mover,
            stream=stream,
            shares=shares,
            pin_folder=pin_folder,
            wall_clock=wall_clock,
            checkpoints=self.group.operations if self.group is not None else None,
        )
        self._toucher: Toucher | None = None  # until `touch`
        self.checkpoints: Checkpoints | None = None
        if self.group is not None:
            self.checkpoints = Checkpoints(self.group, self.residency, self._promoter)

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
        super().start(on_load)
        if self.group is not None:
            self.group.start(on_load)

    def touch(self, others: Sequence[LazyMemory] = ()) -> None:
        """Begins to touch memory before requests do, here and in `others`, in a thread of its
        own."""
        lazy_memories = [*self.lazy_memories(), *others]
        if self.group is not None:
            lazy_memories = [*self.group.lazy_memories(), *lazy_memories]
        self._toucher = Toucher(lazy_memories)
        self._toucher.start()

    def warm_up(self) -> None:
        """Waits for the memory of the first prompts. Call it before any block is used."""
        if self._toucher is not None:
            self._toucher.wait()

    def close(self, *, flush: bool = True) -> int:
        unsaved = super().close(flush=flush)
        if self._toucher is not None:
            self._toucher.close()
        return unsaved + (self.group.close(flush=flush) if self.group is not None else 0)

    # A request's prefix: ticket by ticket.

    def peek(self, chain: Chain) -> int:
        """The number of leading tokens above the disk now. Pins nothing."""
        if self.checkpoints is not None:
            return self.checkpoints.peek(chain)
        return len(self.index.match(chain)) * self.layout.block_size

    def open(self, chain: Chain, *, reads: bool = True) -> Ticket:
        """As for a group, or as far as there is a checkpoint. A private chain, or one not to be
        read, gets an empty ticket."""
        if chain.root in self.operations.blocked:
            chain.private = True
        if chain.private or not reads:
            return Ticket(chain, TicketState.BYPASSED, stop=MissReason.DISABLED)
        if self.checkpoints is not None:
            return self.checkpoints.open(chain)
        ticket = super().open(chain)
        if self.disk is not None and self.disk.is_shared:
            few = [block for block in ticket.blocks if block.hits <= PUBLISH_HITS]
            self.disk.used([block.key for block in few if block.key is not None])
        return ticket

    def advance(self, ticket: Ticket) -> Progress:
        if not ticket.reads:
            return Progress.READY
        if ticket.resume is not None and self.checkpoints is not None:
            return self.checkpoints.advance(ticket)
        return super().advance(ticket)

    def close_ticket(self, ticket: Ticket) -> None:
        if self.checkpoints is not None:
            self.checkpoints.close(ticket)
        super().close_ticket(ticket)

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
        if self._toucher is not None:
            self._toucher.step()
        super().step()
        if self.group is not None:
            self.group.step()

    def rest(self) -> None:
        """Take in that nothing is computed or moved until the next step."""
        if self._toucher is not None:
            self._toucher.rest()

    def flush(self, deadline_s: float = 60.0) -> int:
        unsaved = super().flush(deadline_s)
        return unsaved + (self.group.flush(deadline_s) if self.group is not None else 0)

    @property
    def is_moving(self) -> bool:
        return super().is_moving or (self.group is not None and self.group.is_moving)

    def on_purge(self, detach: Callable[[Collection[PrefixKey]], None]) -> None:
        """Sets what makes running requests of some scopes private. The engine calls it."""
        self.operations.purger.detach = detach

    def stats(self) -> CacheStats:
        counters, keeper = self.residency.counters, self.operations.keeper
        device, host, *below = self.tier_stats()
        return CacheStats(
            device=device,
            host=host,
            below=tuple(below),
            checkpoints=self.group.tier_stats() if self.group is not None else (),
            events=dict(counters.events),
            transfers=counters.transfers.stats(),
            num_loads=self._promoter.num_loads,
            loads_refused=self.economy.refused,
            collisions=self.index.collisions,
            load_bytes_per_s=self.economy.load_bytes_per_s,
            prefill_tokens_per_s=self.economy.prefill_tokens_per_s,
            num_listeners=self.stream.num_subscribers,
            events_missed=self.stream.num_missed,
            block_bytes=self.layout.nbytes,
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
