"""Finds the blocks of a prompt for quotes: first in memory, then below.

Event loop only. A few threads probe the disk; nothing is loaded.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from api.cache.explorer import BlockCaller
from api.job import Job
from tiers.blocks.keys import BlockId
from tiers.operations.face import BlockOperations
from tiers.tier import TierName

AT_ONCE = 2  # concurrent probes of the disk


class CacheSurvey:
    """A `Survey` of one engine's tiers."""

    def __init__(self, call: BlockCaller, block_size: int) -> None:
        self._call = call
        self._block_size = block_size
        self._looks = asyncio.Semaphore(AT_ONCE)

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
