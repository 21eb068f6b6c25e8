"""What three real tiers serve from a trace, beside what `replay --tiers` says of the same sizes.

    python -m tests.bench.served [--trace FILE] [--requests N]

One request after the other goes through the real cache, without an engine: device blocks and host
frames in memory, LMDB shards on disk, the mover's own threads. Between two chunks of a prompt and
between two requests the cache takes its steps until nothing moves, so the disk keeps up and no
block may be lost. A disk holds as many blocks as its bytes allow; the replay is given the number
that the real one held at the end.

Expected: 0.5 points or less between the two in every tier. What remains are the copies that serving
makes ahead of need, which hold a little of the host and of the disk twice.
"""

import json
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.bench.promotions import LOADS, made
from tests.bench.report import arguments, tell
from tiers.blocks.chain import Chain
from tiers.blocks.keys import CacheScope
from tiers.blocks.layout import BlockLayout
from tiers.cache import CacheSettings, TieredCache
from tiers.disk.open import open_disk
from tiers.disk.settings import DiskSettings
from tiers.policy.admission import keeps_copies
from tiers.replay.replay import ReplayResult, TierPlan
from tiers.replay.replay import replay as run_replay
from tiers.replay.trace import Trace, TraceRequest, read_trace
from tiers.telemetry.events import CacheEvent
from tiers.tier import TierName
from tiers.transfer.ticket import Progress

CHUNK_BLOCKS = 8  # computed in one step, as in the engine: 512 tokens in blocks of 64
TOKENS = 4  # in a block, for one of the trace
LAYOUT = BlockLayout.uniform(
    num_layers=8, block_size=TOKENS, num_kv_heads=1, head_dim=32, dtype="float16"
)  # 4 KiB, about what the smallest record takes on disk
RECORD_BYTES = 4_700  # of the disk's files for each block, with its place in the indexes
SHARES = (0.01, 0.05, 0.25)  # of the trace's distinct blocks: device, host, disk
MADE = ("chat", "documents that change")
ROOT = CacheScope(tenant=b"bench").root()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--trace", type=Path, help="a public trace, beside the made ones")
    parser.add_argument("--requests", type=int, help="only so many of each, from the first on")
    options = parser.parse_args()
    traces = [read_trace(options.trace)] if options.trace else []
    traces += [made(name, LOADS[name]) for name in MADE]
    rows = []
    for trace in traces:
        requests = [whole(each) for each in trace.requests[: options.requests]]
        rows.append(compare(replace(trace, requests=requests, block_tokens=TOKENS)))
        print(json.dumps(rows[-1]), flush=True)
    tell({"shares": SHARES, "rows": rows}, options.json)


def whole(request: TraceRequest) -> TraceRequest:
    """The request with full blocks only, each once."""
    blocks = tuple(dict.fromkeys(request.blocks))
    return replace(request, blocks=blocks, input_tokens=TOKENS * len(blocks))


def compare(trace: Trace) -> dict[str, Any]:
    """Percent of the prompt tokens served by each tier, and replayed."""
    sizes = [round(share * trace.working_set_blocks()) for share in SHARES]
    sizes[0] = max(sizes[0], *(len(each.blocks) for each in trace.requests))
    with tempfile.TemporaryDirectory() as folder:
        started = time.process_time()
        served, lost, sizes[2] = serve_trace(trace, sizes, Path(folder))
        cpu_s = time.process_time() - started
    replayed = replay_trace(trace, sizes)
    return {
        "trace": trace.name,
        "requests": len(trace.requests),
        "blocks": dict(zip(("device", "host", "disk"), sizes, strict=True)),
        "served": {name: percent(served[name], trace) for name in list(TierName)[:3]},
        "replayed": {tier.name: percent(tier.hit_tokens, trace) for tier in replayed.tiers},
        "lost": lost,
        "cpu_s": round(cpu_s, 1),
    }


def percent(tokens: int, trace: Trace) -> float:
    return round(100 * tokens / trace.input_tokens, 2)


def replay_trace(trace: Trace, sizes: Sequence[int]) -> ReplayResult:
    plans = [TierPlan(name, size) for name, size in zip(TierName, sizes, strict=False)]
    return run_replay(trace, plans)


def serve_trace(
    trace: Trace, sizes: Sequence[int], folder: Path
) -> tuple[Counter[TierName], int, int]:
    """Hit tokens by tier, blocks lost, and how many blocks the disk held at the end."""
    above, total = sum(sizes[:2]), sum(sizes)
    disk = open_disk(
        folder,
        LAYOUT,
        sizes[2] * RECORD_BYTES,
        settings=DiskSettings(moves=not keeps_copies(above, total)),
    )
    settings = CacheSettings(
        device_bytes=sizes[0] * LAYOUT.nbytes,
        host_bytes=sizes[1] * LAYOUT.nbytes,
        weigh_loads=False,
    )
    cache = TieredCache(LAYOUT, settings, disk=disk)
    cache.start()
    served: Counter[TierName] = Counter()
    numbers: dict[Hashable, int] = {}
    for request in trace.requests:
        tokens = array("i")
        for block in request.blocks:
            first = numbers.setdefault(block, len(numbers)) * TOKENS
            tokens.extend(range(first, first + TOKENS))
        served.update(serve(cache, Chain(ROOT, tokens, TOKENS)))
        settle(cache)
    stats = cache.stats()
    cache.residency.check()
    lost = sum(n for (_, event), n in stats.events.items() if event is CacheEvent.LOST)
    assert stats.disk is not None
    cache.close(flush=False)
    return served, lost, stats.disk.num_blocks


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


if __name__ == "__main__":
    main()
