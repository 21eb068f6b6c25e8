"""The blocks of running sequences, from plan to release.

    plan ─► announced, so that who needs one of them waits ─► provide: a slot ─► commit: full, and
    found by others ─► release: evictable from here on

Called by the scheduler, on the engine thread.
"""

import time

from tiers.blocks.chain import Chain
from tiers.errors import CopyFailed, OutOfBlocks
from tiers.memory.block import Block, BlockState, DeviceState
from tiers.memory.residency import Residency
from tiers.memory.tails import Tail, TailCase, TailSharing
from tiers.policy.policy import Use
from tiers.tier import TierName
from tiers.transfer.demotion import Demoter


class BlockTables:
    """Provides the blocks in block tables. Invariant: only the sequence that is a block's `writer`
    may fill it. Once the block is full and in the index, it has no writer."""

    def __init__(self, residency: Residency, tails: TailSharing, demoter: Demoter) -> None:
        self._residency = residency
        self._index = residency.index
        self._tails = tails
        self._demoter = demoter

    def adopt_tail(self, tail: Tail, chain: Chain, number: int) -> Block | None:
        """Acquire or copy the result of `find_tail` as block `number` of a sequence. None if no
        slot is free or the copy failed.

        If the prompt needs further rows of the block, it is announced as being computed.
        """
        block = self._tails.adopt(tail, chain)
        if block is not None and tail.case is not TailCase.SHARE:
            self._tails.withdraw(block)
            self._announce(chain, number, block)
        return block

    def own_tail(self, block: Block, num_rows: int, chain: Chain) -> Block:
        """Claim a shared block, or copy its rows, before its row `num_rows` is written.

        Raises OutOfBlocks if a copy is needed and no slot is free, and CopyFailed, with the block
        still acquired.
        """
        return self._tails.own(block, num_rows, chain, _use(chain))

    def plan(self, chain: Chain, start: int) -> list[Block]:
        """Make blocks for the chain's tokens from `start` on, acquired and announced as being
        computed. They have no slots yet. Other requests that need one of them wait for it."""
        now_s = time.monotonic()
        blocks = [_made(chain, now_s) for _ in range(start, chain.num_blocks)]
        for number, block in enumerate(blocks, start):
            self._announce(chain, number, block)
        return blocks

    def _announce(self, chain: Chain, number: int, block: Block) -> None:
        block.state = BlockState.COMPUTING
        if chain.private:
            return
        if number >= len(chain.keys):
            self._tails.announce(chain, number, block)
        elif self._index.get(chain.keys[number]) is None:
            self._index.add(block, chain, number)

    def new_block(self, chain: Chain) -> Block:
        """A new block to compute into, acquired and known only to its sequence."""
        return _made(chain, time.monotonic())

    def drop_tail(self, block: Block, chain: Chain) -> Block:
        """Release a shared block that cannot be copied. Returns a new block in its place."""
        self._residency.release(block, _use(chain))
        return self.new_block(chain)

    def provide(self, block: Block) -> int:
        """Give a planned block its slot. Raises OutOfBlocks."""
        tenant = block.writer.root if block.writer is not None else None
        slot = self._residency.take_slot(block, tenant)
        if slot is None:
            raise OutOfBlocks(f"all {self._residency.pool.num_blocks} device blocks are in use")
        self._residency.pool.settle(slot)
        return slot

    def computed_tail(self, block: Block) -> None:
        """Mark the announced rows of a prompt's last block as computed."""
        if block.key is None and block.state is BlockState.COMPUTING:
            block.state = BlockState.READY

    def commit(self, chain: Chain, number: int, block: Block) -> Block:
        """Commit the full block `number` of the chain. Returns the block to keep in the table: this
        one, or one with the same identity that the index already had."""
        if chain.private:
            return block
        self._tails.withdraw(block)
        identity = chain.block_id(number)
        held = self._index.get(identity.key)
        if held is block or held is None:
            if held is None:
                self._index.add(block, chain, number)
            block.writer = None
            block.state = BlockState.READY
            self._residency.counters.came(block, TierName.DEVICE)
            self._demoter.committed(block)
            if self._residency.entered(block):
                self._demoter.write(block)
            return block
        if held.identity() != identity or held.state is not BlockState.READY:
            return block
        extended = block.device is DeviceState.IN_USE  # it was a tail, which the policy knows
        if (block.ref_count > 1 or extended) and self._residency.lacks_slot(held):
            return block  # others read it where it is, or its slot may leave with it alone
        return self._merge(block, held)

    def _merge(self, block: Block, held: Block) -> Block:
        """Keep the block that the index has, and free the duplicate."""
        if held.slot is not None and not held.slot_whole and not self._completed(held, block):
            return block
        block.writer = None
        if held.slot is None:
            self._residency.hand_over(block, held)
            self._residency.counters.came(held, TierName.DEVICE)
        else:
            self._residency.pool.settle(held.slot)
        self._residency.acquire(held)
        self._residency.release(block, block.use)
        return held

    def _completed(self, held: Block, whole: Block) -> bool:
        """Give a block its windows from its equal. False if the copy failed."""
        assert held.slot is not None
        self._residency.pool.settle(held.slot)
        try:
            self._residency.complete(held, whole)
        except CopyFailed as error:
            self._residency.copies.failed(TierName.DEVICE, error)
            return False
        return True

    def share(self, blocks: list[Block]) -> list[Block]:
        """Acquire a sequence's blocks again, for another sequence with the same tokens."""
        for block in blocks:
            self._residency.acquire(block)
        return list(blocks)

    def release(self, chain: Chain, blocks: list[Block], num_tokens: int) -> None:
        """Release a sequence's blocks. The KV of its first `num_tokens` tokens is complete.

        Full blocks stay and may be hit. The partly filled last one is offered if tails are shared.
        Blocks announced beyond it are forgotten. Empties `blocks`.
        """
        use = _use(chain)
        num_full = num_tokens // chain.block_size
        while len(blocks) > num_full:
            block = blocks.pop()
            if block.writer is chain:
                if block.key is not None:
                    self._index.remove(block)  # announced but not filled: nobody must wait for it
                self._tails.offer(chain, len(blocks), block, num_tokens)
            self._residency.release(block, use)
        self._residency.release_prefix(blocks, use)
        blocks.clear()


def _made(chain: Chain, now_s: float) -> Block:
    block = Block(now_s)
    block.writer = chain
    block.ref_count = 1
    return block


def _use(chain: Chain) -> Use:
    """A use now. A scope has one tenant."""
    return Use(time.monotonic(), chain.root)
