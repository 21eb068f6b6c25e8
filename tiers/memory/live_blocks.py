"""Blocks above the disk one by one, as values that may leave the engine thread."""

import time
from collections.abc import Iterable
from typing import NamedTuple

from tiers.blocks.keys import PrefixKey
from tiers.memory.index import Block, BlockState
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
            _tiers(block),
            block.tokens,
            block.depth,
            block.hits,
            block.pins,
            now_s - (block.use.time_s or block.created_s),
            now_s - block.created_s,
        )
        for block in blocks
        if block.state is BlockState.READY
        and block.key is not None
        and block.parent is not None
        and block.scope is not None
    ]


def _tiers(block: Block) -> tuple[TierName, ...]:
    where = (
        (TierName.DEVICE, block.slot is not None),
        (TierName.HOST, block.frame is not None),
        (TierName.DISK, block.on_disk),
    )
    return tuple(name for name, held in where if held)
