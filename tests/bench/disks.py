"""Two disks against one: `python -m tests.bench.disks A B [--mb 120]`, each a folder on a disk.

Blocks are stored and made durable, put out of the page cache, and loaded: over A alone, over B
alone, over both. Rates are of the records' bytes as they lie on the disks, so that each can be
compared with its disk's own. Both should give the sum, as long as a core can code what they take.

Two file systems of a known rate, as root, where the blkio controller is mounted:

    for d in a b; do
      truncate -s 600M $d.img; mkfs.ext4 -qF $d.img; mkdir $d; mount -o loop $d.img $d; done
    g=/sys/fs/cgroup/blkio/disks; mkdir $g
    for n in 0 1; do for way in read write; do
      echo 7:$n 20971520 > $g/blkio.throttle.${way}_bps_device; done; done
    echo $$ > $g/cgroup.procs

20 MiB/s a disk is far below what a core codes (some 700 MB/s), so the estimate is 2.0.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from tests.bench.provenance import commit, machine
from tests.support.faulty_storage import chain, fill, take
from tiers.blocks.frames import FrameArena
from tiers.blocks.keys import BlockId
from tiers.blocks.layout import BlockLayout
from tiers.disk.array import DiskArray, open_array
from tiers.disk.open import open_disk

LAYOUT = BlockLayout.uniform(
    num_layers=2, block_size=64, num_kv_heads=4, head_dim=64, dtype="float32"
)
RUN = 32  # blocks of one call: a prompt of 2,048 tokens
READERS = 2  # prompts loaded at once, as by the threads of the mover


def opened(folders: list[Path], capacity_bytes: int) -> DiskArray:
    return open_array(folders, lambda root: open_disk(root, LAYOUT, capacity_bytes))


def measure(places: list[Path], num_runs: int) -> dict[str, float]:
    """Stored and loaded megabytes a second over folders of these disks."""
    folders = [place / "blocks" for place in places]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    for place in places:  # what was there before is not to be written now
        subprocess.run(["sync", "-f", place], check=True)
    capacity_bytes = 3 * num_runs * RUN * LAYOUT.nbytes
    frames = take(FrameArena(LAYOUT, RUN), RUN)
    runs = [chain(RUN, block_size=LAYOUT.block_size, seed=seed) for seed in range(num_runs)]
    for frame, block in zip(frames, runs[0], strict=True):
        fill(frame, block)
    with closing(opened(folders, capacity_bytes)) as array:
        started = time.perf_counter()
        for ids in runs:
            assert not array.store(ids, frames)
        array.flush()
        stored_s = time.perf_counter() - started
        nbytes = array.stats().written_bytes
    _out_of_the_page_cache(folders)
    with closing(opened(folders, capacity_bytes)) as array:
        started = time.perf_counter()
        with ThreadPoolExecutor(READERS) as threads:
            list(threads.map(lambda ids: _load(array, ids), runs))
        loaded_s = time.perf_counter() - started
    return {
        "megabytes": round(nbytes / 1e6, 1),
        "stored_mb_per_s": round(nbytes / stored_s / 1e6, 1),
        "loaded_mb_per_s": round(nbytes / loaded_s / 1e6, 1),
    }


def _load(array: DiskArray, ids: list[BlockId]) -> None:
    frames = take(FrameArena(LAYOUT, RUN), RUN)
    assert len(ids) == array.load(ids, frames).num_blocks


def _out_of_the_page_cache(folders: list[Path]) -> None:
    for folder in folders:
        for data in folder.glob("shard-*/data.mdb"):
            with data.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("disks", type=Path, nargs=2)
    parser.add_argument("--mb", type=int, default=120)
    asked = parser.parse_args()
    num_runs = asked.mb * 1_000_000 // (RUN * LAYOUT.nbytes)
    first, second = asked.disks
    result = {
        "commit": commit(),
        "machine": machine(),
        "one": measure([first], num_runs),
        "other": measure([second], num_runs),
        "both": measure([first, second], num_runs),
    }
    json.dump(result, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
