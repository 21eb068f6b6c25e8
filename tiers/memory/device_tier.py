"""The device as a tier: the slot and state of each block, and which block leaves next.

Only this module changes `Block.device`. Engine thread only.
"""

from collections import OrderedDict

from tiers.memory.block import DEVICE_MOVES, Block, DeviceState
from tiers.memory.device import DevicePool
from tiers.policy.policy import Policy, Use

ABSENT, FILLING, IN_USE, EVICTABLE, PINNED = DeviceState


class DeviceTier:
    """Invariants: a block has a slot exactly while it is not ABSENT. The policy knows a block while
    it is IN_USE, EVICTABLE or PINNED, and may choose it only while it is EVICTABLE."""

    def __init__(self, pool: DevicePool, policy: Policy[Block]) -> None:
        self.pool = pool
        self.policy = policy
        self.num_idle = 0  # unused blocks: EVICTABLE or PINNED
        self._pinned: OrderedDict[Block, None] = OrderedDict()  # PINNED, coldest first

    @property
    def num_allocatable(self) -> int:
        """Slots that are free or can be freed now."""
        return self.pool.num_free + self.num_idle

    def settle(self, block: Block, slot: int) -> None:
        """Move the block from ABSENT to FILLING and give it this slot."""
        self._move(block, FILLING)
        block.slot, block.slot_whole = slot, True

    def hand_over(self, block: Block, to: Block) -> None:
        """Give the slot of a FILLING block to the block `to`."""
        assert block.device is FILLING, f"{block} is not one sequence's"
        self._move(block, ABSENT)
        slot, block.slot = block.slot, None
        assert slot is not None
        self.settle(to, slot)

    def use(self, block: Block) -> None:
        """Move the block to IN_USE: a request uses it again."""
        if block.device is EVICTABLE:
            self.policy.hold(block)
        else:
            assert block.device is PINNED, f"{block} is in use already"
            del self._pinned[block]
        block.device = IN_USE
        self.num_idle -= 1

    def use_run(self, blocks: list[Block]) -> None:
        """Move EVICTABLE blocks to IN_USE. The hot path of a lookup."""
        hold = self.policy.hold
        for block in blocks:
            assert block.device is EVICTABLE, f"{block} may not be chosen"
            hold(block)
            block.device = IN_USE
        self.num_idle -= len(blocks)

    def idle(self, block: Block, use: Use) -> None:
        """Move the block from FILLING or IN_USE to EVICTABLE or PINNED: its last user has released
        it."""
        if block.device is IN_USE:
            if not block.pinned:
                self.policy.release(block, use)
                block.device = EVICTABLE
                self.num_idle += 1
                return
        else:
            assert block.device is FILLING, f"{block} was not in use"
            self.policy.insert(block, use, None, block.depth)
            if block.pinned:
                self.policy.hold(block)
        self.num_idle += 1
        self._move(block, PINNED if block.pinned else EVICTABLE)
        if block.pinned:
            self._pinned[block] = None

    def idle_run(self, blocks: list[Block], use: Use) -> None:
        """Do the same for blocks that are IN_USE and not pinned. The hot path of a release."""
        release = self.policy.release
        for block in blocks:
            assert block.device is IN_USE, f"{block} was not in use"
            release(block, use)
            block.device = EVICTABLE
        self.num_idle += len(blocks)

    def pin(self, block: Block) -> None:
        """Take in that an operator has pinned the block."""
        if block.device is EVICTABLE:
            self.policy.hold(block)
            self._move(block, PINNED)
            self._pinned[block] = None

    def pin_again(self, block: Block) -> None:
        """Make the block the last to leave among the unused pinned blocks."""
        if block in self._pinned:
            self._pinned.move_to_end(block)

    def unpin(self, block: Block) -> None:
        """Take in that the last pin on the block has ended."""
        if block.device is PINNED:
            del self._pinned[block]
            self._move(block, EVICTABLE)
            self.policy.release(block, block.use)

    def victim(self) -> Block | None:
        """Choose the block that leaves next and make the policy forget it.

        A pinned block is chosen only if there is no other. Pinned blocks with a copy in a lower
        tier go first. The caller frees the slot with `leave`.
        """
        block = self.policy.victim()
        if block is None and self._pinned:
            clean = (b for b in self._pinned if b.held_below or b.frame is not None)
            block = next(clean, next(iter(self._pinned)))
            del self._pinned[block]
            self.policy.remove(block)
        if block is not None:
            assert block.device in (EVICTABLE, PINNED), f"{block} is in use"
            self.num_idle -= 1
        return block

    def leave(self, block: Block) -> int:
        """Move a block that the policy has forgotten to ABSENT. Returns its slot, for a new
        owner."""
        slot = block.slot
        assert slot is not None
        self._move(block, ABSENT)
        block.slot = None
        return slot

    def forget(self, block: Block) -> None:
        """Make the policy forget a block that leaves for a reason other than eviction."""
        if block.device is FILLING:
            return
        self.policy.remove(block)
        if block.device is not IN_USE:
            self._pinned.pop(block, None)
            self.num_idle -= 1

    def _move(self, block: Block, to: DeviceState) -> None:
        assert to in DEVICE_MOVES[block.device], f"{block} cannot become {to.name} on the device"
        block.device = to

    def check(self, blocks: list[Block], private_slots: int) -> None:
        """Assert that slots are conserved. `private_slots` counts the slots of blocks not in
        `blocks`."""
        slots = [block.slot for block in blocks if block.slot is not None]
        assert len(slots) == len(set(slots)), "two blocks own one slot"
        used = self.pool.num_blocks - self.pool.num_free
        assert used == len(slots) + private_slots, f"{used} slots used, {len(slots)} owned"
        idle = [b for b in blocks if b.device in (EVICTABLE, PINNED)]
        assert len(idle) == self.num_idle, "the device policy lost or kept a block"
        for block in blocks:
            assert (block.slot is None) == (block.device is ABSENT), f"{block} has a slot?"
            if block.slot is not None:
                in_use = block.device in (FILLING, IN_USE)
                assert in_use == (block.ref_count > 0), f"{block} is in use?"
            assert (block in self._pinned) == (block.device is PINNED), f"{block} is pinned?"
