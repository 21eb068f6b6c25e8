"""Blocks in memory one by one, as values that may leave the engine thread, and as one forest."""

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tiers.blocks.keys import PrefixKey
from tiers.blocks.tree import COMPUTING, LOADING, Seen, Tree, TreeQuery, grow
from tiers.memory.block import Block, BlockState
from tiers.memory.index import BlockIndex
from tiers.tier import TierName


class LiveBlock(NamedTuple):
    """One full block whose KV stands in memory. Ages are seconds of now."""

    key: PrefixKey
    parent: PrefixKey
    scope: PrefixKey
    tiers: tuple[TierName, ...]  # where it stands, hottest first
    tokens: bytes  # int32 ids
    depth: int  # of the blocks of its prefix, its number from 0
    hits: int  # since it came into memory
    pins: int  # requests that use it now
    idle_s: float
    age_s: float


def live_blocks(blocks: Iterable[Block]) -> list[LiveBlock]:
    """The values of these blocks, without those that are being computed. Engine thread."""
    now_s = time.monotonic()
    return [
        LiveBlock(
            block.key,
            block.parent,
            block.scope,
            tiers_of(block),
            block.tokens,
            block.depth,
            block.hits,
            block.ref_count,
            block.idle_s(now_s),
            now_s - block.created_s,
        )
        for block in blocks
        if block.state is BlockState.READY
        and block.key is not None
        and block.parent is not None
        and block.scope is not None
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


def seen(block: Block, now_s: float) -> Seen:
    """The block as `tiers.blocks.tree` counts it. `now_s` is monotonic."""
    return Seen(
        key=block.key,
        place=place_of(block),
        tokens=block.tokens,
        in_use=block.ref_count > 0,
        hits=block.hits,
        idle_s=block.idle_s(now_s),
        clean=block.held_below or (block.slot is not None and block.frame is not None),
        age_s=now_s - block.created_s,
        tiers=tiers_of(block),
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

    def look(self, block: Block) -> Seen:
        return seen(block, self._now_s)
