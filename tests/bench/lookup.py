"""What the cache's bookkeeping costs a request: hash, look up, verify, pin, build the block table.

    python -m tests.bench.lookup

Steps are measured with an engine whose runner computes nothing.

Estimate for a cached 4,096-token prompt of 64 blocks: a block is one xxh3 of 272 bytes and two
copies of its tokens (0.35 us), one dictionary hit and two comparisons (0.15 us), leaving the LRU
order and a pin (0.15 us): 0.65 us, so about 42 us, whatever the number of resident blocks. A decode
step is some 30 calls a sequence, 4 us; those that wait cost nothing while no more may run.

A resident block takes, beside its KV, 176 bytes of token ids, 64 of key, 240 for the `Block` with
its neighbours in the LRU order, 30 to 60 for its place in the index and 32 for the number of its
slot: 560, and some MB whatever the number of blocks.
"""

import gc
import os
import statistics
import time
from array import array
from pathlib import Path
from typing import Any

from engine.batch import Batch, Sampled
from engine.engine import Engine
from engine.request import Request, SamplingParams
from engine.scheduling.settings import SchedulerSettings
from engine.settings import EngineSettings
from tests.bench.report import arguments, tell
from tiers.blocks.chain import Chain
from tiers.blocks.keys import CacheScope
from tiers.blocks.layout import BlockLayout
from tiers.cache import CacheSettings, TieredCache
from tiers.transfer.ticket import Progress

BLOCK_SIZE = 64
LAYOUT = BlockLayout.uniform(
    num_layers=1, block_size=BLOCK_SIZE, num_kv_heads=1, head_dim=1, dtype="float16"
)
RESIDENT = 100_000
STEPS = ((1, 0), (8, 0), (64, 0), (8, 64))  # sequences that decode, requests that wait


def main() -> None:
    options = arguments(__doc__).parse_args()
    num_blocks = RESIDENT + 1000
    cache = TieredCache(
        LAYOUT, CacheSettings(device_bytes=num_blocks * LAYOUT.nbytes, host_bytes=0)
    )
    root = CacheScope(tenant=b"bench").root()
    prompts = {length: _fill(cache, root, length) for length in (4096, 32768)}
    block_bytes = _fill_up(cache, root)
    rows = [_measure(cache, root, prompt) for prompt in prompts.values()]
    steps = [_measure_steps(cache, prompts[4096], *counts) for counts in STEPS]
    figures: dict[str, Any] = {
        "resident_blocks": len(cache.index),
        "bytes_a_block": block_bytes,
        "rows": rows,
        "steps": steps,
    }
    tell(figures, options.json)


def _fill_up(cache: TieredCache, root: bytes) -> int:
    """Make `RESIDENT` blocks stand; gives what each of the later half takes. No KV is written, so
    the pool takes no memory."""
    marks = []
    for filler in range(1, RESIDENT * BLOCK_SIZE // 4096):
        tokens = array("i", [(filler * 7919 + n) % 49152 for n in range(4096)])
        _compute(cache, Chain(root, tokens, BLOCK_SIZE))
        if len(cache.index) >= RESIDENT // 2 * (1 + len(marks)):
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            marks.append((pages * os.sysconf("SC_PAGE_SIZE"), len(cache.index)))
    (early_bytes, early), (late_bytes, late) = marks
    return round((late_bytes - early_bytes) / (late - early))


def _fill(cache: TieredCache, root: bytes, length: int) -> "array[int]":
    prompt = array("i", [(i * 7919) % 49152 for i in range(length)])
    _compute(cache, Chain(root, prompt, BLOCK_SIZE))  # type: ignore[arg-type]
    return prompt


def _compute(cache: TieredCache, chain: Chain) -> None:
    """Stand in for a request that computed the whole chain."""
    ticket = cache.open(chain)
    blocks = [*ticket.blocks, *cache.tables.plan(chain, len(ticket.blocks))]
    for number in range(len(ticket.blocks), len(blocks)):
        cache.tables.provide(blocks[number])
        blocks[number] = cache.tables.commit(chain, number, blocks[number])
    cache.tables.release(chain, blocks, chain.num_tokens)


def _measure(cache: TieredCache, root: bytes, prompt: "array[int]", rounds: int = 300) -> dict:  # type: ignore[type-arg]
    """Microseconds of admission (hash to block table) and of giving the blocks back."""
    taken, given = [], []
    for _ in range(rounds):
        started = time.perf_counter_ns()
        chain = Chain(root, prompt, BLOCK_SIZE)  # type: ignore[arg-type]
        ticket = cache.open(chain)
        assert cache.advance(ticket) is Progress.READY
        table = [block.slot for block in ticket.blocks]
        taken.append(time.perf_counter_ns() - started)
        assert len(table) == len(prompt) // BLOCK_SIZE
        started = time.perf_counter_ns()
        cache.tables.release(chain, ticket.blocks, len(prompt))
        given.append(time.perf_counter_ns() - started)
    return {
        "prompt_tokens": len(prompt),
        "admit_us_median": statistics.median(taken) / 1e3,
        "admit_us_min": min(taken) / 1e3,
        "release_us_median": statistics.median(given) / 1e3,
    }


class Idle:
    """A runner that computes nothing."""

    def step(self, batch: Batch) -> list[Sampled]:
        return [Sampled(span.sequence_id, 1 if span.sample else None) for span in batch.spans]

    def forget(self, sequence_id: int) -> None:
        pass


def _measure_steps(
    cache: TieredCache, prompt: "array[int]", num_running: int, num_waiting: int
) -> dict[str, Any]:
    """Microseconds of a step beside its compute, all sequences with a cached prompt decoding."""
    settings = EngineSettings(scheduler=SchedulerSettings(max_running=num_running))
    engine = Engine(Idle(), cache, settings, lambda outputs: None)
    for number in range(num_running + num_waiting):
        tokens = array("i", [*prompt, number])
        params = SamplingParams(temperature=0, max_tokens=1000)
        scope = CacheScope(tenant=b"bench")
        engine.submit(Request(request_id=str(number), tokens=tokens, params=params, scope=scope))
    for _ in range(3):
        engine.turn()
    taken = []
    for _ in range(100):
        started = time.perf_counter_ns()
        engine.turn()
        taken.append(time.perf_counter_ns() - started)
    assert engine.stats().num_running == num_running
    for number in range(num_running + num_waiting):
        engine.abort(str(number))
    engine.turn()
    return {
        "running": num_running,
        "waiting": num_waiting,
        "step_us_median": statistics.median(taken) / 1e3,
    }


if __name__ == "__main__":
    main()
