"""How fast blocks are written, by number of shards: `python tests/bench/disk_write.py [--mb 700]`.

Rounds are interleaved: the raw device, then one, two and four shards, each into a fresh folder,
flushed at the end. GB/s are of logical KV; the raw device's rate is of its own bytes, so that what
a tier could reach is that rate times the ratio. CPU seconds are of the process, all threads.

Estimate before the first run, two cores of a Xeon (Sapphire Rapids): encode 0.47 s/GB, xxh3 0.05,
LMDB's copy and the page cache's 0.1 each: 0.7 CPU s/GB, 1.4 GB/s a thread, bound by the device
below 1.2 GB/s of its bytes.
"""

import argparse
import json
import mmap
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench.provenance import commit, machine
from tests.support.faulty_storage import chain, fill, take
from tiers.blocks.frames import FrameArena
from tiers.blocks.layout import BlockLayout
from tiers.disk.open import open_disk

RUN = 8


def cpu_s() -> float:
    use = resource.getrusage(resource.RUSAGE_SELF)
    return use.ru_utime + use.ru_stime


def raw_write(folder: Path, nbytes: int) -> float:
    """Bytes a second, past the page cache."""
    piece = mmap.mmap(-1, 8 << 20)
    piece.write(os.urandom(8 << 20))
    fd = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT | getattr(os, "O_DIRECT", 0))
    started = time.perf_counter()
    for _ in range(nbytes // len(piece)):
        os.write(fd, piece)
    os.fsync(fd)
    elapsed = time.perf_counter() - started
    os.close(fd)
    (folder / "raw").unlink()
    return nbytes // len(piece) * len(piece) / elapsed


def write(folder: Path, layout: BlockLayout, shards: int, nbytes: int) -> dict[str, float]:
    num_runs = nbytes // (RUN * layout.nbytes)
    tier = open_disk(folder, layout, 3 * nbytes, num_shards=shards)
    frames = take(FrameArena(layout, RUN), RUN)
    for frame, block in zip(frames, chain(RUN, block_size=layout.block_size), strict=True):
        fill(frame, block)
    chains = [chain(RUN, block_size=layout.block_size, seed=seed) for seed in range(num_runs)]
    started, cpu = time.perf_counter(), cpu_s()
    for ids in chains:
        assert not tier.store(ids, frames)
    tier.flush()
    elapsed, cpu = time.perf_counter() - started, cpu_s() - cpu
    stats = tier.stats()
    assert stats.stored == num_runs * RUN
    tier.close()
    done = num_runs * RUN * layout.nbytes
    return {
        "gb_per_s": done / elapsed / 1e9,
        "cpu_s_per_gb": cpu / done * 1e9,
        "ratio": done / stats.written_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, default=700)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    layout = BlockLayout.uniform(30, 64, 3, 64, options.dtype)
    nbytes = options.mb << 20
    rows: dict[str, list[dict[str, float]]] = {}
    raws: list[float] = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory(dir=".") as folder:
            raws.append(raw_write(Path(folder), nbytes))
        for shards in (1, 2, 4):
            with tempfile.TemporaryDirectory(dir=".") as folder:
                row = write(Path(folder) / "disk", layout, shards, nbytes)
            rows.setdefault(f"{shards} shards", []).append(row)
    raw = statistics.median(raws) / 1e9
    result = {"commit": commit(), "machine": machine(), "dtype": options.dtype, "raw_gb_per_s": raw}
    for name, found in rows.items():
        best = {key: statistics.median(row[key] for row in found) for key in found[0]}
        best["of_device"] = best["gb_per_s"] / best["ratio"] / raw
        result[name] = {key: round(value, 3) for key, value in best.items()}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
