"""The device as a tier: the slot and state of each block, and which block leaves next.

Only this module changes `Block.device`. Engine thread only.
"""

from collections import Counter, OrderedDict

from tiers.memory.block import DEVICE_MOVES, Block, DeviceState
from tiers.memory.device import DevicePool
from tiers.memory.passed import PassedWindows
from tiers.policy.policy import Policy, Use

ABSENT, FILLING, IN_USE, EVICTABLE, PINNED = DeviceState


class DeviceTier:
    """Invariants: a block has a slot exactly while it is not ABSENT. The policy knows a block while
    it is IN_USE, EVICTABLE or PINNED, and may choose it only while it is EVICTABLE. A block in a
    lesser slot lacks its windows there."""

    def __init__(self, pool: DevicePool, policy: Policy[Block]) -> None:
        self.pool = pool
        self.policy = policy
        self.num_idle = 0  # unused blocks: EVICTABLE or PINNED
        self._pinned: OrderedDict[Block, None] = OrderedDict()  # PINNED, coldest first
        self._places = pool.places
        self._cuts = pool.num_lesser > 1
        # Blocks in lesser slots, by the whole slot, and how many of these are FILLING or IN_USE.
        self._beside: dict[int, set[Block]] = {}
        self._used_beside: dict[int, int] = {}
        self.passed = PassedWindows(self._has_spare_windows)

    @property
    def num_allocatable(self) -> int:
        """Whole slots that are free or can be freed now."""
        num_free, num_idle = self.pool.num_free, self.num_idle
        if self._beside:
            used = self._used_beside
            num_idle -= self._places.num_lesser_taken - sum(used.values())
            num_free += len(self._beside) - len(used)
        return num_free + num_idle

    def settle(self, block: Block, slot: int) -> None:
        """Move the block from ABSENT to FILLING and give it this slot."""
        self._move(block, FILLING)
        block.slot, block.slot_whole = slot, True
        if self._cuts:
            self._came_to(block, slot)

    def moved(self, block: Block, slot: int) -> None:
        """Take in that the block has another slot, or the first part of its own."""
        self._left(block)
        block.slot = slot
        self._came_to(block, slot)

    def exchange(self, block: Block, other: Block) -> None:
        self._left(block)
        self._left(other)
        block.slot, other.slot = other.slot, block.slot
        for each in (block, other):
            assert each.slot is not None
            self._came_to(each, each.slot)

    def beside(self, slot: int) -> list[Block]:
        """The blocks in lesser slots of the same whole slot, if nobody uses any of them."""
        number = self._places.whole_of(slot)
        return [] if number in self._used_beside else list(self._beside.get(number, ()))

    def _has_spare_windows(self, block: Block) -> bool:
        idle = block.device is EVICTABLE and block.slot is not None and not block.use.windows
        return self._cuts and idle and not self._places.is_lesser(block.slot or 0)

    def _came_to(self, block: Block, slot: int) -> None:
        if self._places.is_lesser(slot):
            block.slot_whole = False
            self._beside.setdefault(self._places.whole_of(slot), set()).add(block)
            if block.device in (FILLING, IN_USE):
                self._count_use(block, 1)

    def _left(self, block: Block) -> None:
        assert block.slot is not None
        number = self._places.whole_of(block.slot)
        if block not in (beside := self._beside.get(number, ())):
            return
        if block.device in (FILLING, IN_USE):
            self._count_use(block, -1)
        if len(beside) == 1:
            del self._beside[number]
        else:
            self._beside[number].remove(block)

    def _count_use(self, block: Block, change: int) -> None:
        assert block.slot is not None
        number = self._places.whole_of(block.slot)
        if block in self._beside.get(number, ()):
            count = self._used_beside.get(number, 0) + change
            if count:
                self._used_beside[number] = count
            else:
                del self._used_beside[number]

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
        if self._beside:
            self._count_use(block, 1)

    def use_run(self, blocks: list[Block]) -> None:
        """Move EVICTABLE blocks to IN_USE. The hot path of a lookup."""
        hold = self.policy.hold
        for block in blocks:
            assert block.device is EVICTABLE, f"{block} may not be chosen"
            hold(block)
            block.device = IN_USE
        self.num_idle -= len(blocks)
        if self._beside:
            for block in blocks:
                self._count_use(block, 1)

    def idle(self, block: Block, use: Use) -> None:
        """Move the block to EVICTABLE or PINNED: its last user has released it."""
        if self._beside:
            self._count_use(block, -1)
        if block.device is IN_USE:
            if not block.pinned:
                self.policy.release(block, use)
                block.device = EVICTABLE
                self.num_idle += 1
                return
        else:
            assert block.device is FILLING, f"{block} was not in use"
            self.policy.insert(block, use)
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
        if self._beside:
            for block in blocks:
                self._count_use(block, -1)

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
        """Move a block that the policy has forgotten to ABSENT. Returns its slot."""
        slot = block.slot
        assert slot is not None
        if self._cuts:
            self._left(block)
            self.passed.forget(block)
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
        """Assert that slots are conserved. Blocks not in `blocks` have `private_slots`."""
        slots = [block.slot for block in blocks if block.slot is not None]
        assert len(slots) == len(set(slots)), "two blocks own one slot"
        used = self._places.num_taken
        assert used == len(slots) + private_slots, f"{used} slots used, {len(slots)} owned"
        if self._cuts:
            self._check_lesser([block for block in blocks if block.slot is not None])
        idle = [b for b in blocks if b.device in (EVICTABLE, PINNED)]
        assert len(idle) == self.num_idle, "the device policy lost or kept a block"
        for block in blocks:
            assert (block.slot is None) == (block.device is ABSENT), f"{block} has a slot?"
            if block.slot is not None:
                in_use = block.device in (FILLING, IN_USE)
                assert in_use == (block.ref_count > 0), f"{block} is in use?"
            assert (block in self._pinned) == (block.device is PINNED), f"{block} is pinned?"

    def _check_lesser(self, blocks: list[Block]) -> None:
        """Assert that lesser slots and their users are counted. No private block is in one."""
        places = self._places
        lesser = [b for b in blocks if b.slot is not None and places.is_lesser(b.slot)]
        assert places.num_lesser_taken == len(lesser) == sum(map(len, self._beside.values()))
        assert len(self._beside) == places.num_cut
        used = Counter(places.whole_of(b.slot or 0) for b in lesser if b.ref_count)
        assert used == self._used_beside, "users of lesser slots were miscounted"
        for block in lesser:
            assert block.slot is not None and not block.slot_whole, f"{block} has no windows there"
            assert block in self._beside[places.whole_of(block.slot)]
