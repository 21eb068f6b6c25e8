"""Reads the live index for the event loop, a few milliseconds of the engine thread at a time."""

import asyncio
from functools import partial

from api.cache.explorer import BlockCaller, in_process
from tiers.blocks.view import BlockView
from tiers.memory.block import Block
from tiers.memory.view import live_blocks
from tiers.operations.face import BlockOperations

AT_ONCE = 2_000  # blocks in one turn: about 2 ms


async def read_blocks(call: BlockCaller | None) -> list[BlockView]:
    """Every block above the disk, partly filled ones as well. Raises NotServed without `call`: the
    blocks are in another process.

    Blocks that come or go meanwhile may or may not be included.
    """
    call = in_process(call)
    blocks: list[Block] = await asyncio.wrap_future(
        call(lambda cache: [*cache.index, *cache.index.iter_partials()])
    )
    found: list[BlockView] = []
    for start in range(0, len(blocks), AT_ONCE):
        some = blocks[start : start + AT_ONCE]
        found += await asyncio.wrap_future(call(partial(_read, some)))
    return found


def _read(blocks: list[Block], _: BlockOperations) -> list[BlockView]:
    return live_blocks(blocks)
