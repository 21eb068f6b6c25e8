"""Looks at an engine's tiers for the event loop. Nothing is loaded.

The live index is read a few milliseconds of the engine thread at a time. A few threads probe the
disk.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from api.cache.explorer import BlockCaller, in_process
from api.job import Job
from tiers.blocks.keys import BlockId
from tiers.blocks.view import BlockView
from tiers.memory.block import Block
from tiers.memory.view import live_blocks
from tiers.operations.face import BlockOperations
from tiers.tier import TierName

BLOCKS_AT_ONCE = 2_000  # in one turn: about 2 ms
PROBES_AT_ONCE = 2  # of the disk


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
    for start in range(0, len(blocks), BLOCKS_AT_ONCE):
        some = blocks[start : start + BLOCKS_AT_ONCE]
        found += await asyncio.wrap_future(call(partial(_read, some)))
    return found


def _read(blocks: list[Block], _: BlockOperations) -> list[BlockView]:
    return live_blocks(blocks)


class CacheSurvey:
    """A `Survey` of one engine's tiers: first of memory, then of what is below."""

    def __init__(self, call: BlockCaller, block_size: int) -> None:
        self._call = call
        self._block_size = block_size
        self._looks = asyncio.Semaphore(PROBES_AT_ONCE)

    async def __call__(self, job: Job) -> Sequence[Mapping[str, int]]:
        return [await self._found(job, number) for number in range(len(job.prompts))]

    async def _found(self, job: Job, number: int) -> Mapping[str, int]:
        def look(cache: BlockOperations) -> tuple[BlockOperations, list[TierName], list[BlockId]]:
            chain = job.chain(number, self._block_size)
            sources = cache.sources(chain)
            return cache, sources, chain.block_ids(len(sources), len(chain.keys))

        cache, sources, rest = await asyncio.wrap_future(self._call(look))
        if rest:
            async with self._looks:
                sources += await asyncio.to_thread(cache.places_below, rest)
        tokens: Counter[Any] = Counter()
        for tier in sources:
            tokens[str(tier)] += self._block_size
        over = tokens.total() - (len(job.prompts[number]) - 1)  # the last token is always computed
        if over > 0:
            tokens[str(sources[-1])] -= over
        return tokens
