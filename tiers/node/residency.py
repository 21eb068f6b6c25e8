"""The frame of each block in a node, its users, and the order of eviction.

    absent ──► FILLING | LOADING ──► HELD ──► absent

Called by `node.pool`, on the node's thread only, so there are no locks. Invariants, checked by
`NodeResidency.check`:

1. Every frame in use belongs to one block. `Capacity.used_bytes` counts all layouts' frames.
2. A block is evictable exactly while it is HELD and not leased.
3. A detached block cannot be found. It keeps its frame until its last user releases it.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from tiers.blocks.keys import PrefixKey
from tiers.node.arena import SharedMemory
from tiers.node.block import NodeBlock, NodeBlockState
from tiers.node.capacity import Capacity
from tiers.telemetry.events import EventKind, EventStream
from tiers.tier import Cause, TierName


@dataclass(slots=True, eq=False)
class NodeResidency:
    """The blocks of one layout in memory. `has_below`: whether a tier below can hold them too."""

    memory: SharedMemory
    capacity: Capacity
    has_below: bool
    stream: EventStream = field(default_factory=EventStream)
    pinned_keys: Container[PrefixKey] = ()
    evicted: int = 0
    lost: int = 0  # evicted before the tier below had them
    unwritten: "OrderedDict[PrefixKey, NodeBlock]" = field(default_factory=OrderedDict)
    _blocks: dict[PrefixKey, NodeBlock] = field(default_factory=dict)
    _by_frame: dict[int, NodeBlock] = field(default_factory=dict)
    _free: list[int] = field(default_factory=list)
    _fresh: int = 0  # frames from this number on were never used

    def __post_init__(self) -> None:
        self.capacity.sharers.append(self)

    # Finding.

    def find(self, key: PrefixKey) -> NodeBlock | None:
        return self._blocks.get(key)

    def ready(self, key: PrefixKey) -> NodeBlock | None:
        """The block under a key, if it may be served."""
        block = self._blocks.get(key)
        return block if block is not None and block.state is NodeBlockState.HELD else None

    def at(self, frame: int) -> NodeBlock:
        return self._by_frame[frame]

    def holds(self, block: NodeBlock) -> bool:
        """Whether the block still has its frame, because it was not dropped."""
        return self._by_frame.get(block.frame) is block

    def of_scopes(self, roots: frozenset[PrefixKey]) -> list[NodeBlock]:
        """The blocks of these scopes that can be found. Any thread may call it."""
        return [block for block in list(self._blocks.values()) if block.id.scope in roots]

    # Entering, using and leaving.

    def take_frame(self, scope: PrefixKey) -> int | None:
        """A frame for a new block of this scope. None if no block can leave to make room."""
        if not self.capacity.make_room(self.memory.stride, self, scope):
            return None
        if self._free:
            frame = self._free.pop()
        elif self._fresh < self.memory.num_frames:
            frame, self._fresh = self._fresh, self._fresh + 1
        else:
            return None
        return frame

    def add(self, block: NodeBlock) -> NodeBlock:
        self._blocks[block.key] = self._by_frame[block.frame] = block
        self.capacity.take(block, self.memory.stride)
        return block

    def take(self, block: NodeBlock) -> None:
        """Use the block. It stays until `drop`."""
        block.leases += 1
        self.relist(block)

    def drop(self, block: NodeBlock) -> None:
        """Stop using the block. Does nothing after the load of a block failed."""
        if not self.holds(block):
            return
        block.leases -= 1
        self.rest(block)

    def rest(self, block: NodeBlock) -> None:
        """If the block is unused, make it the hottest evictable one."""
        if block.leases or block.state is not NodeBlockState.HELD:
            return
        if block.detached:
            self.forget(block)
            return
        if block.key in self.pinned_keys:
            block.pinned = True
        self.capacity.touch(block)
        self.relist(block)

    def relist(self, block: NodeBlock) -> None:
        """Make the block evictable, if it may leave. A pinned block may only if the tier below has
        it."""
        idle = block.state is NodeBlockState.HELD and not block.leases and not block.detached
        if idle and (not block.pinned or block.is_below):
            self.capacity.set_idle(block, self)
        else:
            self.capacity.set_busy(block)

    def forget(self, block: NodeBlock) -> None:
        """Remove the block and free its frame."""
        if not block.detached:
            self._unlist(block)
        del self._by_frame[block.frame]
        self._free.append(block.frame)
        self.capacity.give_back(block, self.memory.stride)
        block.state = NodeBlockState.FILLING  # a lease still naming it must not serve it

    def detach(self, block: NodeBlock) -> None:
        """Remove the block from the index. Its frame is freed when its last user releases it."""
        if block.state is NodeBlockState.HELD:
            self.tell(EventKind.REMOVED, block, cause=Cause.REQUEST)
        if block.leases == 0 and block.state is NodeBlockState.HELD:
            self.remove(block)
            return
        block.detached = True
        self._unlist(block)

    def remove(self, block: NodeBlock) -> None:
        """Forget the block and return its memory to the system."""
        self.forget(block)
        self.memory.give_back(block.frame)

    def _unlist(self, block: NodeBlock) -> None:
        self._blocks.pop(block.key, None)
        self.unwritten.pop(block.key, None)
        self.capacity.set_busy(block)

    # Pins.

    def pin(self, block: NodeBlock) -> None:
        """Pin the block: it leaves after all others, and only once the tier below has it."""
        block.pinned = True
        self.relist(block)

    def unpin(self, block: NodeBlock) -> None:
        block.pinned = False
        self.relist(block)

    # Room.

    @property
    def num_blocks(self) -> int:
        return len(self._by_frame)

    @property
    def frame_bytes(self) -> int:
        return self.memory.stride

    def blocks(self) -> Iterable[NodeBlock]:
        """Every block that has a frame."""
        return self._by_frame.values()

    def evict(self, block: NodeBlock, cause: Cause, *, keeps_memory: bool) -> None:
        """Drop an idle block. It is lost if the tier below does not have it yet."""
        self.evicted += 1
        self.lost += self.has_below and not block.is_below
        self.tell(EventKind.REMOVED, block, cause=cause)
        (self.forget if keeps_memory else self.remove)(block)

    def tell(
        self,
        kind: EventKind,
        block: NodeBlock,
        *,
        source: TierName | None = None,
        cause: Cause | None = None,
    ) -> None:
        """Publish an event of the block in memory."""
        if self.stream.listening:
            self.stream.publish(
                kind,
                TierName.HOST,
                key=block.key,
                parent=block.id.parent,
                scope=block.id.scope,
                tokens=block.id.tokens if cause is None else b"",
                nbytes=self.memory.layout.nbytes,
                source=source,
                cause=cause,
            )

    def check(self) -> None:
        """Assert the invariants above."""
        frames = set(self._by_frame)
        assert all(block.frame == frame for frame, block in self._by_frame.items())
        assert len(self._blocks) == sum(not block.detached for block in self._by_frame.values())
        assert frames.isdisjoint(self._free)
        assert len(frames) + len(self._free) == self._fresh
        for block in self._blocks.values():
            idle = block.state is NodeBlockState.HELD and not block.leases
            may_leave = idle and (not block.pinned or block.is_below)
            assert may_leave == self.capacity.is_idle(block), block
            assert block.leases == 0 or block.state is not NodeBlockState.FILLING, block
        self.capacity.check()
