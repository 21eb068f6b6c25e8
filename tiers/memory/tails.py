"""Reuses part of a block: where a prompt ends, or diverges from another, inside it.

    no candidate begins like it ..... a new block
    still being computed ............ wait for it
    holds all the tokens wanted ..... share it read-only; copy it before a token is appended
    all its tokens are wanted ....... extend it in place; one writer at a time, others copy
    they diverge in the middle ...... copy the rows before the divergence to a new block

This is the "you only compute once" scheme. Candidates are the full and partly filled blocks that
continue the same parent. The first `len(tokens)` rows of a block never change, so readers need no
protection from the one writer that appends. Engine thread only.
"""

import time
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from tiers.blocks.chain import Chain
from tiers.blocks.keys import TOKEN_BYTES, PrefixKey
from tiers.blocks.packing import low_halves, may_begin, may_share, unpack
from tiers.errors import CopyFailed, OutOfBlocks
from tiers.memory.block import Block, BlockState
from tiers.memory.residency import Residency
from tiers.policy.policy import Use
from tiers.tier import Cause, TierName

MAX_CANDIDATES = 8  # partly filled blocks kept per parent; the oldest unused goes first
MAX_FULL_CANDIDATES = 32  # full blocks compared, newest first: a root may have thousands


class TailCase(Enum):
    """How a candidate is reused."""

    WAIT = auto()
    SHARE = auto()
    EXTEND = auto()
    COPY = auto()


@dataclass(frozen=True, slots=True)
class Tail:
    """A match: the first `num_rows` rows of `block` are the tokens that follow a matched prefix."""

    block: Block
    num_rows: int
    case: TailCase

    @property
    def source(self) -> TierName:
        return TierName.DEVICE if self.block.slot is not None else TierName.HOST


class TailSharing:
    """Finds blocks to reuse in part, prepares them, and takes them back."""

    def __init__(self, residency: Residency, *, enabled: bool) -> None:
        self._residency = residency
        self._index = residency.index
        self._enabled = enabled

    def find(self, chain: Chain, number: int) -> Tail | None:
        """The block that shares the most leading tokens with block `number` of the chain."""
        return self.nearest(chain, number) if self._enabled else None

    def nearest(self, chain: Chain, number: int) -> Tail | None:
        """Like `find`, but also searches when tails are not shared."""
        if chain.content(number):
            return None
        wanted = chain.chunks[number] if number < len(chain.chunks) else chain.tail
        parent = chain.parent(number)
        low = low_halves(wanted)
        best: Block | None = None
        most = 0
        for block in self._candidates(parent):
            if block.content or not may_share(block.packed, low, most + 1):
                continue
            rows = _common_rows(block.packed, wanted)
            if rows > most and block.state in (BlockState.READY, BlockState.COMPUTING):
                best, most = block, rows
        if best is None:
            return None
        return Tail(best, most, _case(best, most, len(wanted) // TOKEN_BYTES))

    def _candidates(self, parent: PrefixKey) -> list[Block]:
        """Blocks that continue `parent`, newest first, up to the bounds on a search."""
        full = self._index.children(parent)[-MAX_FULL_CANDIDATES:]
        if self._residency.pool.layout.reach:
            full = [block for block in full if _has_windows(block)]
        return [*reversed(self._index.partials(parent)), *reversed(full)]

    def adopt(self, tail: Tail, chain: Chain) -> Block | None:
        """Acquire the block, or copy its matching rows to a new one. None if that fails."""
        block = tail.block
        assert tail.case is not TailCase.WAIT
        if block.slot is not None and tail.case is not TailCase.COPY:
            if tail.case is TailCase.EXTEND:
                block.writer = chain
            self._residency.pool.settle(block.slot)
            self._residency.acquire(block)
            return block
        try:
            return self._copy(block, tail.num_rows, chain)
        except CopyFailed:
            return None

    def own(self, block: Block, num_rows: int, chain: Chain, use: Use) -> Block:
        """Make row `num_rows` of the block writable.

        Takes over the caller's reference to `block`. Returns the block itself or a copy, with one
        reference. Raises OutOfBlocks, or CopyFailed: the reference is then still the caller's.
        """
        if block.writer is None and block.num_tokens == num_rows:  # so it is partly filled
            block.writer = chain
            return block
        copy = self._copy(block, num_rows, chain)
        if copy is None:
            raise OutOfBlocks("no device block is free to copy a shared tail to")
        self._residency.release(block, use)
        return copy

    def announce(self, chain: Chain, number: int, block: Block) -> None:
        """Register that this chain computes its tail into the block. Others may wait for it."""
        if self._enabled and chain.tail and not chain.content(number):
            self._index.add_partial(block, chain.root, chain.parent(number), chain.tail)

    def offer(self, chain: Chain, number: int, block: Block, num_tokens: int) -> None:
        """Offer the filled rows of a block that this chain has written for reuse."""
        block.writer = None
        self.withdraw(block)
        data = chain.chunks[number] if number < len(chain.chunks) else chain.tail
        rows = num_tokens - number * chain.block_size
        if not self._enabled or chain.private or rows <= 0 or chain.content(number):
            return
        tokens, parent = data[: rows * TOKEN_BYTES], chain.parent(number)
        if self._prune(parent, tokens):
            block.state = BlockState.READY
            self._index.add_partial(block, chain.root, parent, tokens)

    def withdraw(self, block: Block) -> None:
        """Stop offering the block as a partly filled candidate."""
        if self._index.is_partial(block):
            self._index.remove_partial(block)

    def _prune(self, parent: PrefixKey, tokens: bytes) -> bool:
        """Make room among the candidates. False if one has all of these tokens."""
        for block in self._index.children(parent):
            if _begins(block, tokens) and not block.content:
                return False
        candidates = list(self._index.partials(parent))
        if any(_begins(block, tokens) for block in candidates):
            return False
        redundant = [block for block in candidates if tokens.startswith(block.tokens)]
        surplus = candidates[: max(0, len(candidates) - MAX_CANDIDATES + 1)]
        for block in {*redundant, *surplus}:
            if block.ref_count == 0:
                freed = self._residency.forget_everywhere(block, Cause.REDUNDANT)
                assert freed, f"{block} is being copied"
        return True

    def _copy(self, source: Block, num_rows: int, chain: Chain) -> Block | None:
        """A new block with one reference, whose first `num_rows` rows are copied from the source.
        None if no slot is free. Raises CopyFailed, after it is counted."""
        residency = self._residency
        residency.acquire(source)  # so that it is not evicted to make room for its own copy
        block = Block(time.monotonic())
        slot = residency.take_slot(block, chain.root)
        try:
            if slot is not None:
                self._fill(slot, source, num_rows)
        except CopyFailed as error:
            residency.take_back(block)
            here = TierName.HOST if source.slot is None else TierName.DEVICE
            residency.copies.failed(here, error)
            raise
        finally:
            residency.release(source, source.use)
        if slot is None:
            return None
        block.writer = chain
        block.ref_count = 1
        return block

    def _fill(self, slot: int, source: Block, num_rows: int) -> None:
        if source.slot is not None:
            self._residency.pool.copy_rows(source.slot, slot, num_rows)
        elif source.frame is not None:
            self._copy_up(source, slot)

    def _copy_up(self, source: Block, slot: int) -> None:
        residency = self._residency
        assert source.frame is not None
        started = time.perf_counter()
        copy = residency.pool.copy_in([source.frame], [slot])
        residency.pool.settle(slot)  # the next step reads its rows
        residency.copies.watch(copy, (source,), TierName.HOST, TierName.DEVICE, started)


def _has_windows(block: Block) -> bool:
    """Whether the block's rows include the KV of layers with windows."""
    return block.slot_whole if block.slot is not None else block.is_whole or not block.frame


def _begins(block: Block, tokens: bytes) -> bool:
    return may_begin(block.packed, tokens) and block.tokens.startswith(tokens)


def _common_rows(packed: bytes, want: bytes) -> int:
    have = unpack(packed)
    size = min(len(have), len(want))
    if have[:size] == want[:size]:
        return size // TOKEN_BYTES
    different = np.frombuffer(have[:size], np.int32) != np.frombuffer(want[:size], np.int32)
    return int(different.argmax())


def _case(block: Block, rows: int, num_wanted: int) -> TailCase:
    if block.state is BlockState.COMPUTING:
        return TailCase.WAIT
    if rows == num_wanted:
        return TailCase.SHARE
    if rows == block.num_tokens and block.writer is None:
        return TailCase.EXTEND
    return TailCase.COPY
