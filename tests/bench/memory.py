"""What the cache's bookkeeping weighs: bytes of the process for each block, beside its KV.

    python -m tests.bench.memory [--blocks N] [--block-size TOKENS] [--json FILE]

The KV of a block is tiny here and subtracted. Estimate for a resident block of 64 tokens: 176 bytes
of token ids, 64 of key, 240 for the `Block` with its neighbours in the LRU order, 30 to 60 for its
place in the index, 32 for the number of its slot: 560, and some MB whatever the number of blocks.
A host frame is a number and an object of 48 bytes; its views are made when they are asked for.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.provenance import commit, machine
from tiers.blocks.chain import Chain
from tiers.blocks.frames import FrameArena
from tiers.blocks.keys import CacheScope
from tiers.blocks.layout import BlockLayout
from tiers.cache import CacheSettings, TieredCache

CHAIN_BLOCKS = 64
SMALL_DEVICE = 256  # blocks
VOCABULARY = 49_152  # SmolLM2's; ids of 65,536 and more take three bytes instead of two
DICE = np.random.default_rng(0)  # made before anything is measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=200_000)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--only", choices=MEASURES, help="in this process, and nothing else")
    options = parser.parse_args()
    layout = BlockLayout.uniform(
        num_layers=1,
        block_size=options.block_size,
        num_kv_heads=1,
        head_dim=1,
        dtype="float16",
    )
    if options.only:
        print(MEASURES[options.only](layout, options.blocks))
        return
    figures: dict[str, Any] = {
        "machine": machine(),
        "commit": commit(),
        "blocks": options.blocks,
        "block_size": options.block_size,
        **{name: _alone(name, options.blocks, options.block_size) for name in MEASURES},
    }
    print(json.dumps(figures, indent=1))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def _alone(name: str, num_blocks: int, block_size: int) -> int:
    """A figure measured in a process of its own, which has freed nothing yet that is used again."""
    sizes = ["--blocks", str(num_blocks), "--block-size", str(block_size)]
    command = [sys.executable, "-m", "tests.bench.memory", "--only", name, *sizes]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _device(layout: BlockLayout, num_blocks: int) -> int:
    """Bytes a block that stands on the device alone."""
    before = _resident()
    cache = TieredCache(
        layout, CacheSettings(device_bytes=num_blocks * layout.nbytes, host_bytes=0)
    )
    _fill(cache, num_blocks)
    return round((_resident() - before) / len(cache.index) - layout.nbytes)


def _frames(layout: BlockLayout, num_blocks: int) -> int:
    """Bytes of an arena for each frame that nobody has taken."""
    before = _resident()
    arena = FrameArena(layout, num_blocks)
    return round((_resident() - before) / arena.num_frames)


def _host(layout: BlockLayout, num_blocks: int) -> int:
    """Bytes a block that stands on the host alone, its frame included."""
    before = _resident()
    settings = CacheSettings(
        device_bytes=SMALL_DEVICE * layout.nbytes, host_bytes=num_blocks * layout.nbytes
    )
    cache = TieredCache(layout, settings)
    _fill(cache, num_blocks)
    num_host = cache.residency.host.num_blocks
    return round((_resident() - before - num_host * layout.nbytes) / num_host)


def _fill(cache: TieredCache, num_blocks: int) -> None:
    """Compute chains until every block is taken, all different."""
    root = CacheScope(tenant=b"bench").root()
    size = cache.layout.block_size
    for _ in range(-(-num_blocks // CHAIN_BLOCKS)):
        tokens = DICE.integers(0, VOCABULARY, CHAIN_BLOCKS * size, dtype=np.int32)
        chain = Chain(root, array("i", tokens.tobytes()), size)
        ticket = cache.open(chain)
        blocks = [*ticket.blocks, *cache.tables.plan(chain, len(ticket.blocks))]
        for place in range(len(ticket.blocks), len(blocks)):
            cache.tables.provide(blocks[place])
            blocks[place] = cache.tables.commit(chain, place, blocks[place])
        cache.tables.release(chain, blocks, chain.num_tokens)
        cache.step()


MEASURES = {"device_block": _device, "frame_unused": _frames, "host_block": _host}


def _resident() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
