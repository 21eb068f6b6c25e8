"""Prompts served by the real cache without an engine, for tests of what its tiers do."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from tiers.blocks.chain import Chain
from tiers.blocks.keys import CacheScope
from tiers.blocks.layout import BlockLayout
from tiers.cache import TieredCache
from tiers.replay.replay import ReplayResult, TierPlan
from tiers.replay.replay import replay as run_replay
from tiers.replay.trace import Trace, TraceRequest
from tiers.tier import TierName
from tiers.transfer.ticket import Progress

CHUNK_BLOCKS = 8  # computed in one step, as in the engine: 512 tokens in blocks of 64
TOKENS = 4  # in a block, for one of the trace
LAYOUT = BlockLayout.uniform(
    num_layers=8, block_size=TOKENS, num_kv_heads=1, head_dim=32, dtype="float16"
)  # 4 KiB, about what the smallest record takes on disk
ROOT = CacheScope(tenant=b"bench").root()


def whole(request: TraceRequest) -> TraceRequest:
    """The request with full blocks only, each once."""
    blocks = tuple(dict.fromkeys(request.blocks))
    return replace(request, blocks=blocks, input_tokens=TOKENS * len(blocks))


def replay_trace(trace: Trace, sizes: Sequence[int]) -> ReplayResult:
    plans = [TierPlan(name, size) for name, size in zip(TierName, sizes, strict=False)]
    return run_replay(trace, plans)


def serve(cache: TieredCache, chain: Chain) -> dict[TierName, int]:
    """Stand in for a request that computes what it does not hit; its hit tokens by tier."""
    ticket = cache.open(chain)
    while cache.advance(ticket) is not Progress.READY:
        time.sleep(0)
        cache.step()
    hits = Counter(ticket.sources)
    blocks = [*ticket.blocks, *cache.tables.plan(chain, len(ticket.blocks))]
    for computed, number in enumerate(range(len(ticket.blocks), len(blocks)), 1):
        cache.tables.provide(blocks[number])
        blocks[number] = cache.tables.commit(chain, number, blocks[number])
        if computed % CHUNK_BLOCKS == 0:
            settle(cache)
    ticket.blocks.clear()
    cache.tables.release(chain, blocks, chain.num_tokens)
    return {tier: TOKENS * count for tier, count in hits.items()}


def settle(cache: TieredCache) -> None:
    cache.step()
    while cache.is_moving:
        time.sleep(0)
        cache.step()
