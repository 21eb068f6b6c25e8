"""Blocks in memory as values that may leave the engine thread."""

import time
from collections.abc import Iterable

from tiers.blocks.view import COMPUTING, LOADING, BlockView
from tiers.memory.block import Block, BlockState
from tiers.tier import TierName


def live_blocks(blocks: Iterable[Block]) -> list[BlockView]:
    """Views of blocks that are still in the index and complete. Engine thread only."""
    now_s = time.monotonic()
    return [
        block_view(block, now_s)
        for block in blocks
        if block.state is BlockState.READY and block.parent is not None
    ]


def place_of(block: Block) -> str:
    """The hottest tier that holds the block, or "computing" or "loading"."""
    if block.state is BlockState.READY:
        return TierName.DEVICE if block.slot is not None else TierName.HOST
    return LOADING if block.state is BlockState.LOADING else COMPUTING


def tiers_of(block: Block) -> tuple[TierName, ...]:
    """Every tier that holds the block, hottest first, and not memory that is being filled."""
    ready = block.state is BlockState.READY
    held = (
        (TierName.DEVICE, ready and block.slot is not None),
        (TierName.HOST, ready and block.frame is not None),
        (TierName.DISK, block.held_below),
    )
    return tuple(tier for tier, holds in held if holds)


def block_view(block: Block, now_s: float) -> BlockView:
    """The block's current state as a value. `now_s` is monotonic. Engine thread only."""
    return BlockView(
        key=block.key,
        parent=block.parent,
        scope=block.scope,
        place=place_of(block),
        tiers=tiers_of(block),
        tokens=block.tokens,
        hits=block.hits,
        idle_s=block.idle_s(now_s),
        age_s=now_s - block.created_s,
        num_requests=block.ref_count,
        is_clean=block.held_below or (block.slot is not None and block.frame is not None),
    )
