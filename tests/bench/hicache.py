"""SGLang's host memory over our disk tier, compressed and raw, and over its own `file` backend.

`python -m tests.bench.hicache FOLDER [ROUNDS]` prints GB/s of KV: stored, loaded, and loaded after
a restart, in pages of 2 MiB of bfloat16 between a host pool of SGLang's and the page cache. Its
limit from first principles: a checksum reads at 30 GB/s a thread, zstd deflates bfloat16 at 0.9 and
inflates it at 2.5, and a copy out of the page cache moves 5 to 10. SGLang's classes:
`make test-sglang`.
"""

import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tests.sglang.conftest import CLASSES

BATCH, BATCHES, LAYERS = 32, 8, 32
NAMES = ("cachesvc", "raw", "file")


def main(folder: Path, rounds: int) -> None:
    sys.path.append(str(CLASSES))
    from tests.sglang import pools

    found: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    pool = pools.mha(num_pages=BATCH, layers=LAYERS)
    for number in range(rounds):
        for name in NAMES[:: -1 if number % 2 else 1]:
            with TemporaryDirectory(dir=folder) as kept:
                run(pools, pool, name, Path(kept), found)
    print(f"{'':10}" + "".join(f"{what:>16}" for what in ("stored", "loaded", "restarted")))
    for name in NAMES:
        rates = (found[name, what] for what in ("stored", "loaded", "restarted"))
        print(f"{name:10}" + "".join(f"{statistics.median(each):13.2f} GB/s" for each in rates))


def run(pools, pool, name, kept, found) -> None:
    (kept / "config.json").write_text("{}")
    pools.serves(kept)
    kv, slots = pools.types.PoolName.KV, torch.arange(BATCH * pools.PAGE)
    gigabytes = BATCH * BATCHES * pool.size_per_token * pools.PAGE / 1e9

    def opened():
        if name != "file":
            told = pools.config(pools.options(kept / "kv", "4GiB", compress=name != "raw"))
            return pools.opened("dynamic", told, {kv: pool})
        storage = pools.types.HiCacheFile(pools.config(), str(kept / "files"))
        storage.register_mem_host_pool_v2(pool, kv)
        return storage

    def timed(move, number):
        names = [f"{each:064x}" for each in range(number * BATCH, (number + 1) * BATCH)]
        began_s = time.perf_counter()
        told = move([pools.types.PoolTransfer(kv, slots, keys=names)])
        seconds = time.perf_counter() - began_s
        assert told == {kv: [True] * BATCH}, name
        return seconds

    storage = opened()
    wanted, stored = [], 0.0
    for number in range(BATCHES):
        wanted.append(pools.filled(pool, BATCH, number))
        stored += timed(storage.batch_set_v2, number)
    found[name, "stored"].append(gigabytes / stored)
    for what in ("loaded", "restarted"):
        loads = 0.0
        for number in range(BATCHES):
            pools.wiped(pool, BATCH)
            loads += timed(storage.batch_get_v2, number)
            assert wanted[number] == pools.pages_of(pool, BATCH), name
        found[name, what].append(gigabytes / loads)
        if name != "file":
            storage.close()
        storage = opened()
    if name != "file":
        storage.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int((*sys.argv[2:], "3")[0]))
