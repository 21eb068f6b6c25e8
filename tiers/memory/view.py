"""Blocks in memory one by one, as values that may leave the engine thread, and as one forest."""

import time
from collections.abc import Iterable, Sequence

from tiers.blocks.keys import PrefixKey
from tiers.blocks.tree import Tree, TreeQuery, grow
from tiers.blocks.view import COMPUTING, LOADING, BlockView
from tiers.memory.block import Block, BlockState
from tiers.memory.index import BlockIndex
from tiers.tier import TierName


def live_blocks(blocks: Iterable[Block]) -> list[BlockView]:
    """Those of these blocks that are full and whose KV stands. Engine thread."""
    now_s = time.monotonic()
    return [
        block_view(block, now_s)
        for block in blocks
        if block.state is BlockState.READY and block.key is not None
    ]


def live_tree(index: BlockIndex, query: TreeQuery) -> Tree:
    """As much of the index as the query bounds, as it stands now."""
    return grow(_IndexForest(index, time.monotonic()), query, len(index) + index.num_partials)


def place_of(block: Block) -> str:
    """The hottest tier that holds the block, or what is being done to have it stand."""
    if block.state is BlockState.READY:
        return TierName.DEVICE if block.slot is not None else TierName.HOST
    return LOADING if block.state is BlockState.LOADING else COMPUTING


def tiers_of(block: Block) -> tuple[TierName, ...]:
    """Every tier that holds the block, the hottest first; none while it is computed or loaded."""
    ready = block.state is BlockState.READY
    held = (
        (TierName.DEVICE, ready and block.slot is not None),
        (TierName.HOST, ready and block.frame is not None),
        (TierName.DISK, block.held_below),
    )
    return tuple(tier for tier, holds in held if holds)


def block_view(block: Block, now_s: float) -> BlockView:
    """The block as it is now; `now_s` is monotonic. Engine thread."""
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
        pins=block.ref_count,
        is_clean=block.held_below or (block.slot is not None and block.frame is not None),
        depth=block.depth,
    )


class _IndexForest:
    def __init__(self, index: BlockIndex, now_s: float) -> None:
        self._index = index
        self._now_s = now_s

    def scopes(self) -> Iterable[PrefixKey]:
        return self._index.scopes()

    def following(self, key: PrefixKey) -> Sequence[Block]:
        full, partly = self._index.children(key), self._index.partials(key)
        return [*full, *partly] if partly else full

    def rank(self, block: Block) -> int:
        return block.hits

    def look(self, block: Block) -> BlockView:
        return block_view(block, self._now_s)
