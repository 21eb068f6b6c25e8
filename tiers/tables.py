"""The blocks of running sequences: planned and announced, given slots, filled, let go.

    plan ─► announced, so that who needs one of them waits ─► provide: a slot ─► commit: full, and
    found by others ─► release: evictable from here on

Called by the scheduler, on the engine thread.
"""

import time

from tiers.blocks.chain import Chain
from tiers.errors import OutOfBlocks
from tiers.memory.block import Block, BlockState
from tiers.memory.residency import Residency
from tiers.memory.tails import Tail, TailCase, TailSharing
from tiers.policy.policy import Use
from tiers.telemetry.working_set import Traffic
from tiers.tier import TierName
from tiers.transfer.demotion import Demoter


class BlockTables:
    """What fills the block tables. Invariant: a block with a `writer` is that sequence's to fill,
    and nobody else's; once it is full and found by others it has none."""

    def __init__(
        self, residency: Residency, tails: TailSharing, demoter: Demoter, traffic: Traffic
    ) -> None:
        self._residency = residency
        self._index = residency.index
        self._tails = tails
        self._demoter = demoter
        self._traffic = traffic

    def adopt_tail(self, tail: Tail, chain: Chain, number: int) -> Block | None:
        """Acquire or copy what `find_tail` found, as block `number` of a sequence; None: no room.

        A block of which the prompt needs further rows is announced as being computed.
        """
        block = self._tails.adopt(tail, chain)
        if block is not None and tail.case is not TailCase.SHARE:
            self._tails.withdraw(block)
            self._announce(chain, number, block)
        return block

    def own_tail(self, block: Block, num_rows: int, chain: Chain) -> Block:
        """Before row `num_rows` of a shared block is written: claim it, or copy its rows.

        Raises OutOfBlocks where a copy is needed and there is no slot.
        """
        return self._tails.own(block, num_rows, chain, _use(chain, 1))

    def plan(self, chain: Chain, start: int) -> list[Block]:
        """Blocks, acquired and announced as being computed, for the chain's tokens from `start` on.

        They have no slots yet. Another request that needs one of them waits for it.
        """
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
        """A block to be computed into, acquired, known to its sequence alone."""
        return _made(chain, time.monotonic())

    def provide(self, block: Block) -> int:
        """Give a block that is to be computed its slot. Raises OutOfBlocks."""
        tenant = block.writer.root if block.writer is not None else None
        slot = self._residency.take_slot(block, tenant)
        if slot is None:
            raise OutOfBlocks(f"all {self._residency.pool.num_blocks} device blocks are in use")
        return slot

    def computed_tail(self, block: Block) -> None:
        """The rows that a prompt's last block was announced with stand now."""
        if block.key is None and block.state is BlockState.COMPUTING:
            block.state = BlockState.READY

    def commit(self, chain: Chain, number: int, block: Block) -> Block:
        """Block `number` of the chain is full. Returns the block to keep in the table: this one,
        or one that was there already with the same identity."""
        if chain.private:
            return block
        self._tails.withdraw(block)
        identity = chain.block_id(number)
        held = self._index.get(identity.key)
        if held is block or held is None:
            if held is None:
                self._index.add(block, chain, number)
                self._traffic.made(identity.key)
            block.writer = None
            block.state = BlockState.READY
            self._residency.counters.came(block, TierName.DEVICE)
            self._demoter.committed(block)
            if self._residency.entered(block):
                self._demoter.write(block)
            return block
        if held.identity() != identity or held.state is not BlockState.READY:
            return block
        if held.slot is None and block.ref_count > 1:
            return block  # others read it where it is
        return self._merge(block, held)

    def _merge(self, block: Block, held: Block) -> Block:
        """Keep the block that the index has, and free the duplicate."""
        block.writer = None
        if held.slot is None:
            self._residency.hand_over(block, held)
            self._residency.counters.came(held, TierName.DEVICE)
        else:
            self._residency.pool.settle(held.slot)
            if not held.slot_whole:
                self._residency.complete(held, block)
        self._residency.acquire(held)
        self._residency.release(block, block.use)
        return held

    def share(self, blocks: list[Block]) -> list[Block]:
        """Acquire a sequence's blocks once more, for another sequence with the same tokens."""
        for block in blocks:
            self._residency.acquire(block)
        return list(blocks)

    def release(self, chain: Chain, blocks: list[Block], num_tokens: int) -> None:
        """A sequence is done with its blocks; the KV of its first `num_tokens` tokens stands.

        Full blocks stay and may be hit; the partly filled last one is offered where tails are
        shared; what was announced beyond is forgotten. Empties `blocks`.
        """
        use = _use(chain, len(blocks))
        num_full = num_tokens // chain.block_size
        while len(blocks) > num_full:
            block = blocks.pop()
            if block.writer is chain:
                if block.key is not None:
                    self._index.remove(block)  # announced, and not filled: nobody is to wait for it
                self._tails.offer(chain, len(blocks), block, num_tokens)
            self._residency.release(block, use)
        self._residency.release_run(reversed(blocks), use)
        blocks.clear()


def _made(chain: Chain, now_s: float) -> Block:
    block = Block(now_s)
    block.writer = chain
    block.ref_count = 1
    return block


def _use(chain: Chain, num_blocks: int) -> Use:
    """A use at this moment; a scope has one tenant, whose habits a policy may learn."""
    return Use(time.monotonic(), num_blocks, chain.root)
