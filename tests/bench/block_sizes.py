"""What longer blocks cost in hits, and shorter ones in calls: `python tests/bench/block_sizes.py`.

    --trace FILE [--trace FILE] [--json FILE]

Public traces name blocks of 512 tokens, so where two prompts part within one is made up: at a token
that is uniform from a seed. Then each trace is replayed in blocks of 64 to 512 tokens under LRU, in
tiers of the same bytes. Beside that, blocks of equal content and other bytes are copied from host
to device memory and read from disk (page cache), 32 at a time.

Estimate: a prompt that parts loses half a block, so 256 instead of 64 costs 96 tokens: 0.8 points
of chats of 12,000 tokens, 0.1 of agents' 102,000. A copy costs some 3 us beside its bytes and a
record 30 us, so reading a block of 1 MiB is dominated by its bytes (400 us at 2.5 GB/s), and of one
of 57 kB it is not.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from tests.bench.provenance import commit, machine
from tests.support.faulty_storage import chain, take
from tiers.blocks.frames import FrameArena
from tiers.blocks.layout import BlockLayout
from tiers.disk.open import open_disk
from tiers.memory.device import DevicePool
from tiers.replay.replay import TierPlan, replay
from tiers.replay.trace import Trace, read_trace

SIZES = (64, 128, 256, 512)
SHARES = (0.05, 0.20, 1.0)  # of the tokens of a trace's distinct blocks
BLOCK_KIB = (57, 128, 256, 512, 1024, 2048, 4096)
RUN = 32  # blocks of one prefix, moved at once


class Parting:
    """Cuts a trace's blocks, so that two with one parent share some of their first tokens."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._first: dict[Hashable, Hashable] = {}  # the first block seen after a parent

    def cut(self, size: int) -> Trace:
        requests = [
            replace(each, blocks=self._cut(each.blocks, each.input_tokens, size))
            for each in self._trace.requests
        ]
        return replace(self._trace, requests=requests, block_tokens=size)

    def _cut(self, blocks: tuple[Hashable, ...], num_tokens: int, size: int) -> tuple[Any, ...]:
        pieces: list[Hashable] = []
        parent: Hashable = None
        for block in blocks:
            first = self._first.setdefault(parent, block)
            dice = random.Random(f"{block}").randrange(self._trace.block_tokens)
            shared = dice if block != first else self._trace.block_tokens
            for end in range(size, self._trace.block_tokens + 1, size):
                pieces.append((first if end <= shared else block, end))
            parent = block
        return tuple(pieces[: -(-num_tokens // size)])


def hits(path: Path) -> list[dict[str, Any]]:
    """Hit rates by block size, at each share of the trace's distinct tokens."""
    trace = read_trace(path)
    distinct = trace.working_set_blocks() * trace.block_tokens
    rows = []
    for size in SIZES:
        cut = Parting(trace).cut(size)
        plans = [TierPlan("cache", round(share * distinct / size)) for share in SHARES]
        rates = {
            share: round(replay(cut, [plan]).hit_rate, 4)
            for share, plan in zip(SHARES, plans, strict=True)
        }
        rows.append({"block_size": size, **{f"{share:.0%}": rate for share, rate in rates.items()}})
        print(path.name, rows[-1], flush=True)
    return rows


def moves(kib: int) -> dict[str, Any]:
    """Microseconds a block of `kib` takes from host to device, and from disk to host."""
    layout = BlockLayout.uniform(1, 64, 1, kib * 1024 // 2 // 128, "bfloat16")
    arena, pool = FrameArena(layout, 2 * RUN), DevicePool(layout, RUN, "cpu")
    source, target = take(arena, RUN), take(arena, RUN)
    generator = torch.Generator().manual_seed(0)
    for frame in source:
        frame.tensor.copy_(torch.randn(frame.tensor.shape, generator=generator))
    copy_us = _median_us(lambda: pool.copy_in(source, range(RUN)))
    with tempfile.TemporaryDirectory() as folder:
        disk = open_disk(Path(folder), layout, 1 << 30)
        blocks = chain(RUN, block_size=64, seed=1)
        disk.store(blocks, source)
        read_us = _median_us(lambda: disk.load(blocks, target))
        disk.close()
    row = {"kib": layout.nbytes >> 10, "copy_us": copy_us, "read_us": read_us}
    print(row, flush=True)
    return row


def _median_us(move: Callable[[], object], rounds: int = 15) -> float:
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        move()
        taken.append((time.perf_counter() - started) * 1e6 / RUN)
    return round(statistics.median(taken), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, action="append", default=[])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = {
        "commit": commit(),
        "machine": machine(),
        "moves": [moves(kib) for kib in BLOCK_KIB],
        "hits": {path.name: hits(path) for path in arguments.trace},
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
