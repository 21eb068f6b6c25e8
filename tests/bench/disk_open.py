"""How long a full disk tier takes to open: `python tests/bench/disk_open.py [--gb 20]`.

Fills a tier with blocks that do not compress, closes it, drops its pages from the page cache and
opens it again, each time in a fresh process; beside that, its RAM, and the first load.

Estimate before the first run: opening reads disk.json and, of each shard, LMDB's two meta pages and
the root of each of six trees, some 4 KiB each: 10 reads at 0.1 to 0.3 ms from a cold device, so a
few milliseconds, whatever the tier holds. RAM: nothing a block, since the index is LMDB's pages.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench.provenance import commit, machine
from tests.support.faulty_storage import chain, take
from tiers.blocks.frames import Frame, FrameArena
from tiers.blocks.layout import BlockLayout
from tiers.disk.open import open_disk
from tiers.disk.tier import DiskTier

RUN = 16  # blocks of one prefix
LAYOUT = BlockLayout.uniform(30, 64, 3, 64, "bfloat16")  # SmolLM2-135M's, 1.5 MB a block


def fill(tier: DiskTier, frames: list[Frame]) -> int:
    """Store prefixes until the tier evicts; returns the seed of the last one."""
    for frame in frames:
        frame.buffer[:] = os.urandom(len(frame.buffer))
    seed = 0
    while not tier.stats().evicted:
        seed += 1
        tier.store(chain(RUN, block_size=LAYOUT.block_size, seed=seed), frames)
    tier.flush()
    return seed


def drop_pages(folder: Path) -> None:
    for path in folder.rglob("data.mdb"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def anonymous_bytes() -> int:
    """Memory of this process that is not pages of files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/status has no RssAnon; this bench needs Linux")


def open_once(folder: Path, capacity_bytes: int, seed: int) -> tuple[float, float, int]:
    """In a fresh process: seconds to open, seconds of the first load, bytes of RAM both took."""
    frames = take(FrameArena(LAYOUT, RUN), RUN)
    for frame in frames:
        frame.buffer[:] = bytes(len(frame.buffer))
    before, started = anonymous_bytes(), time.perf_counter()
    tier = open_disk(folder, LAYOUT, capacity_bytes)
    opened_s = time.perf_counter() - started
    grown = anonymous_bytes() - before
    started = time.perf_counter()
    loaded = tier.load(chain(RUN, block_size=LAYOUT.block_size, seed=seed), frames)
    first_s = time.perf_counter() - started
    assert loaded.num_blocks == RUN, loaded
    tier.close()
    return opened_s, first_s, grown


def measure(folder: Path, capacity_bytes: int, times: int) -> dict[str, object]:
    frames = take(FrameArena(LAYOUT, RUN), RUN)
    started = time.perf_counter()
    tier = open_disk(folder, LAYOUT, capacity_bytes)
    seed = fill(tier, frames)
    filled_s = time.perf_counter() - started
    stats = tier.stats()
    tier.close()
    rows = []
    for _ in range(times):
        drop_pages(folder)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows.append(pool.apply(open_once, (folder, capacity_bytes, seed)))
    opened_s, first_s, grown = zip(*rows, strict=True)
    return {
        "capacity_gb": capacity_bytes / 1e9,
        "file_gb": round(stats.used_bytes / 1e9, 3),
        "num_blocks": stats.num_blocks,
        "fill_s": round(filled_s, 1),
        "open_ms_median": round(1e3 * statistics.median(opened_s), 2),
        "open_ms_max": round(1e3 * max(opened_s), 2),
        "first_load_ms_median": round(1e3 * statistics.median(first_s), 1),
        "first_load_blocks": RUN,
        "ram_of_opening_bytes": int(statistics.median(grown)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, nargs="*", default=[0.5, 20])
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    rows = []
    for size in options.gb:
        folder = Path(tempfile.mkdtemp(prefix="cachesvc-open-", dir=options.folder))
        try:
            rows.append(measure(folder / "disk", int(size * 1e9), options.times))
        finally:
            shutil.rmtree(folder)
        print(json.dumps(rows[-1], indent=1), flush=True)
    if options.json:
        report = {
            "commit": commit(),
            "machine": machine(),
            "rows": rows,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
