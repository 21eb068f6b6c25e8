"""vLLM's own offload over our disk tier and over its own `fs`, side by side.

`python -m tests.bench.vllm_offload FOLDER [ROUNDS]` prints GB/s of KV: stored, loaded, and loaded
after a restart. Its limit from first principles: a checksum reads at about 10 GB/s a thread, zstd
inflates bfloat16 at about 1.5, and a copy out of the page cache moves 5 to 10.
"""

import statistics
import sys
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.vllm.processes import Offloading

BATCH, BATCHES = 48, 8
TIERS: dict[str, dict[str, Any]] = {
    "cachesvc": {"type": "cachesvc", "bytes": "4GiB"},
    "fs": {"type": "fs"},
}
PLACE = {"cachesvc": "dir", "fs": "root_dir"}


def main(folder: Path, rounds: int) -> None:
    found: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(rounds):
        order = [*TIERS][:: -1 if number % 2 else 1]
        for name in order:
            with TemporaryDirectory(dir=folder) as kept:
                run(name, Path(kept), found)
    print(f"{'':10}" + "".join(f"{what:>16}" for what in ("stored", "loaded", "restarted")))
    for name in TIERS:
        rates = (found[name, what] for what in ("stored", "loaded", "restarted"))
        print(f"{name:10}" + "".join(f"{statistics.median(each):13.2f} GB/s" for each in rates))


def run(name: str, kept: Path, found: defaultdict[tuple[str, str], list[float]]) -> None:
    model = kept / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    tier = TIERS[name] | {PLACE[name]: str(kept / "kv")}
    engine = Offloading(kept / "log")
    firsts = range(0, BATCH * BATCHES, BATCH)
    gigabytes = BATCH * BATCHES * (1 << 20) / 1e9
    engine("open", model=str(model), tier=tier)
    stored = [engine("store", first=first, count=BATCH)["seconds"] for first in firsts]
    found[name, "stored"].append(gigabytes / sum(stored))
    for what in ("loaded", "restarted"):
        loads = [engine("load", first=first, count=BATCH) for first in firsts]
        assert all(len(each["hits"]) == BATCH and not each["wrong"] for each in loads), name
        found[name, what].append(gigabytes / sum(each["seconds"] for each in loads))
        engine("close")
        engine("open", model=str(model), tier=tier)
    engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int((*sys.argv[2:], "3")[0]))
