"""Which frame of a node holds which block, who uses it, and which block leaves next.

    absent ──► FILLING | LOADING ──► HELD ──► absent

Called by `node.pool`, on the node's thread only, so there are no locks. Invariants, checked by
`NodeResidency.check`:

1. Every frame in use is one block's. `Capacity.used_bytes` is what the frames of all layouts take.
2. A block is evictable exactly while it is HELD and nobody leases it.
3. A detached block cannot be found. It keeps its frame until its last user releases it.
"""

from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass, field
from enum import Enum, auto

from tiers.blocks.keys import BlockId, PrefixKey
from tiers.node.arena import SharedMemory

LOOK_FOR_CLEAN = 64  # coldest blocks among which one that is held below is preferred


class NodeBlockState(Enum):
    """How far a block is."""

    FILLING = auto()  # a client writes it
    LOADING = auto()  # it comes from the tier below
    HELD = auto()


@dataclass(slots=True, eq=False)
class NodeBlock:
    """One block and its frame. `leases` counts clients and writes that use the frame."""

    id: BlockId
    frame: int
    state: NodeBlockState
    client: int = 0  # who fills it
    leases: int = 0
    is_below: bool = False
    tick: int = 0  # when it was last used, against all blocks of the node
    pinned: bool = False
    detached: bool = False  # no longer found; freed when its last user releases it

    @property
    def key(self) -> PrefixKey:
        return self.id.key

    @property
    def held_below(self) -> bool:
        return self.is_below


class Capacity:
    """The bytes that all layouts of a node share, and the order in which they use them."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.sharers: list[NodeResidency] = []
        self._tick = 0

    def next_tick(self) -> int:
        self._tick += 1
        return self._tick

    def make_room(self, num_bytes: int, asker: "NodeResidency") -> bool:
        """Evict the coldest blocks of any layout until `num_bytes` fit; False when they cannot."""
        while self.used_bytes + num_bytes > self.capacity_bytes:
            candidates = [each for each in self.sharers if each.num_evictable]
            if not candidates:
                return False
            coldest = min(candidates, key=NodeResidency.coldest_tick)
            coldest.evict(keeps_memory=coldest is asker)
        return True


@dataclass(slots=True, eq=False)
class NodeResidency:
    """The blocks of one layout in memory. `has_below`: a tier below can hold them too."""

    memory: SharedMemory
    capacity: Capacity
    has_below: bool
    pinned_keys: Container[PrefixKey] = ()
    evicted: int = 0
    lost: int = 0  # evicted before the tier below had them
    unwritten: "OrderedDict[PrefixKey, NodeBlock]" = field(default_factory=OrderedDict)
    _blocks: dict[PrefixKey, NodeBlock] = field(default_factory=dict)
    _by_frame: dict[int, NodeBlock] = field(default_factory=dict)
    _evictable: "OrderedDict[PrefixKey, NodeBlock]" = field(default_factory=OrderedDict)
    _pinned: "OrderedDict[PrefixKey, NodeBlock]" = field(default_factory=OrderedDict)  # and clean
    _free: list[int] = field(default_factory=list)
    _fresh: int = 0  # frames from here on were never used

    def __post_init__(self) -> None:
        self.capacity.sharers.append(self)

    # Finding.

    def find(self, key: PrefixKey) -> NodeBlock | None:
        return self._blocks.get(key)

    def ready(self, key: PrefixKey) -> NodeBlock | None:
        """The block under a key, where it may be served."""
        block = self._blocks.get(key)
        return block if block is not None and block.state is NodeBlockState.HELD else None

    def at(self, frame: int) -> NodeBlock:
        return self._by_frame[frame]

    def holds(self, block: NodeBlock) -> bool:
        """The block still has its frame: it was not forgotten."""
        return self._by_frame.get(block.frame) is block

    def of_scopes(self, roots: frozenset[PrefixKey]) -> list[NodeBlock]:
        """The blocks of these scopes that can be found. Any thread."""
        return [block for block in list(self._blocks.values()) if block.id.scope in roots]

    # Coming and going.

    def take_frame(self) -> int | None:
        """A frame for a new block; None where no other block can leave for it."""
        stride = self.memory.stride
        if not self.capacity.make_room(stride, self):
            return None
        if self._free:
            frame = self._free.pop()
        elif self._fresh < self.memory.num_frames:
            frame, self._fresh = self._fresh, self._fresh + 1
        else:
            return None
        self.capacity.used_bytes += stride
        return frame

    def add(self, block: NodeBlock) -> NodeBlock:
        self._blocks[block.key] = self._by_frame[block.frame] = block
        return block

    def take(self, block: NodeBlock) -> None:
        """Use the block: it stays until `drop`."""
        block.leases += 1
        self.relist(block)

    def drop(self, block: NodeBlock) -> None:
        """Stop using the block. Does nothing after the load of a block failed."""
        if not self.holds(block):
            return
        block.leases -= 1
        self.rest(block)

    def rest(self, block: NodeBlock) -> None:
        """Make the block the hottest of the evictable ones, if nobody uses it."""
        if block.leases or block.state is not NodeBlockState.HELD:
            return
        if block.detached:
            self.forget(block)
            return
        block.tick = self.capacity.next_tick()
        if block.key in self.pinned_keys:
            block.pinned = True
        for table in (self._evictable, self._pinned):
            table.pop(block.key, None)
        self.relist(block)

    def relist(self, block: NodeBlock) -> None:
        """List the block where it may leave from, if it may. Its place in the list stays."""
        idle = block.state is NodeBlockState.HELD and not block.leases and not block.detached
        for table, belongs in (
            (self._evictable, idle and not block.pinned),
            (self._pinned, idle and block.pinned and block.is_below),
        ):
            if not belongs:
                table.pop(block.key, None)
            elif block.key not in table:
                table[block.key] = block

    def forget(self, block: NodeBlock) -> None:
        """Remove the block and free its frame."""
        if not block.detached:
            self._unlist(block)
        del self._by_frame[block.frame]
        self._free.append(block.frame)
        self.capacity.used_bytes -= self.memory.stride
        block.state = NodeBlockState.FILLING  # a lease that still names it does not serve it

    def detach(self, block: NodeBlock) -> None:
        """Remove the block from the index. Its frame is freed when its last user releases it."""
        if block.leases == 0 and block.state is NodeBlockState.HELD:
            self.remove(block)
            return
        block.detached = True
        self._unlist(block)

    def remove(self, block: NodeBlock) -> None:
        """Forget the block and give its memory back to the system."""
        self.forget(block)
        self.memory.give_back(block.frame)

    def _unlist(self, block: NodeBlock) -> None:
        for table in (self._blocks, self._evictable, self._pinned, self.unwritten):
            table.pop(block.key, None)

    # Pins.

    def pin(self, block: NodeBlock) -> None:
        """From now on the block leaves after all others, and only to the tier below."""
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
    def num_evictable(self) -> int:
        return len(self._evictable) + len(self._pinned)

    def coldest_tick(self) -> int:
        return next(iter((self._evictable or self._pinned).values())).tick

    def evict(self, *, keeps_memory: bool) -> None:
        """Drop the coldest block; one that is held below goes before one that would be lost."""
        block = self._victim()
        self.evicted += 1
        self.lost += self.has_below and not block.is_below
        (self.forget if keeps_memory else self.remove)(block)

    def _victim(self) -> NodeBlock:
        coldest = self._evictable or self._pinned
        for number, block in enumerate(coldest.values()):
            if block.is_below or not self.has_below:
                return block
            if number == LOOK_FOR_CLEAN:
                break
        return next(iter(coldest.values()))

    def check(self) -> None:
        """Assert the invariants above."""
        frames = set(self._by_frame)
        assert all(block.frame == frame for frame, block in self._by_frame.items())
        assert len(self._blocks) == sum(not block.detached for block in self._by_frame.values())
        assert frames.isdisjoint(self._free)
        assert len(frames) + len(self._free) == self._fresh
        for key, block in self._blocks.items():
            idle = block.state is NodeBlockState.HELD and not block.leases
            assert (idle and not block.pinned) == (key in self._evictable), block
            assert (idle and block.pinned and block.is_below) == (key in self._pinned), block
            assert block.leases == 0 or block.state is not NodeBlockState.FILLING, block
        used = sum(each.num_blocks * each.memory.stride for each in self.capacity.sharers)
        assert used == self.capacity.used_bytes <= self.capacity.capacity_bytes
