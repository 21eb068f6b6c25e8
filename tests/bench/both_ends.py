"""Time to the first token of a prefix on a slow disk: loaded, computed, or both from either end.

    python -m tests.bench.both_ends [--tokens 4096 16384] [--rounds N] [--json FILE]

The default model, one request at a time. A reader of the disk waits, so that all of the prefix
takes as long to load as a multiple (`--load`) of the time to compute it cold. In each round every
way answers another question about the same document, in turn.

Estimate: with loads as slow as computing, half of the time of either; both ends meet in the middle
of the blocks, and as attention makes late tokens dearer than early ones, a little before it.
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cachesvc.bench import Document, Probe, sink
from cachesvc.config.sections import CacheSection, EngineSection, ModelSection
from cachesvc.server import compute
from engine.composition import Core
from tests.bench.provenance import commit, machine
from tiers.blocks.frames import Frame
from tiers.blocks.keys import BlockId
from tiers.tier import Loaded, ManagedTier

WAYS = ("load", "compute", "both ends")
BLOCK = 64


class SlowReads:
    """A tier whose reads together take at least `block_s` a block. Everything else passes."""

    def __init__(self, tier: ManagedTier) -> None:
        self._tier = tier
        self._free_s = 0.0
        self._lock = threading.Lock()
        self.block_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def load(self, ids: Sequence[BlockId], into: Sequence[Frame]) -> Loaded:
        with self._lock:
            begin_s = max(time.monotonic(), self._free_s)
            self._free_s = begin_s + self.block_s * len(ids)
            until_s = self._free_s
        loaded = self._tier.load(ids, into)
        time.sleep(max(0.0, until_s - time.monotonic()))
        return loaded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--load", type=float, default=1.0, help="time to load, in cold times")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        loaded = compute.load(ModelSection(), Path(folder))
        loaded = replace(loaded, max_context=max(loaded.max_context, max(options.tokens) + 128))
        for size in options.tokens:
            figures.append(measured(loaded, Path(folder), size, options))
            print(json.dumps(figures[-1]), flush=True)
    result = {"machine": machine(), "commit": commit(), "load": options.load, "figures": figures}
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def measured(loaded: Any, folder: Path, size: int, options: argparse.Namespace) -> dict[str, Any]:
    layout = loaded.layout(BLOCK, None)
    room = (size // BLOCK + 16) * layout.nbytes * 2
    cache = CacheSection(
        block_size=BLOCK,
        device_bytes=room,
        host_bytes=room,
        disk_bytes=4 * room,
        write_policy="write_through",
        both_ends=True,
    )
    probe = Probe()
    core = compute.build(
        loaded,
        kv_dtype="auto",
        cache=cache,
        engine=EngineSection(),
        data_dir=folder / str(size),
        on_outputs=probe.on_outputs,
    )
    core.start(512)
    try:
        return _rounds(core, probe, Document(loaded.tokenizer, size, seed=size), options)
    finally:
        core.close()


def _rounds(
    core: Core, probe: Probe, document: Document, options: argparse.Namespace
) -> dict[str, Any]:
    promoter = core.cache._promoter
    mover, economy = promoter._mover, promoter._economy
    assert mover is not None
    slow = SlowReads(mover._tier)
    mover._tier = slow  # type: ignore[assignment]
    num_blocks = document.size // BLOCK
    warm = Document(document._tokenizer, 256, seed=-1)
    probe.ask(core, warm.ask(0))
    cold_s, _ = probe.ask(core, document.ask(0))
    slow.block_s = options.load * cold_s / num_blocks
    taken: dict[str, list[float]] = {way: [] for way in options.ways}
    hits: dict[str, int] = {}
    for number in range(options.rounds):
        for way in options.ways:
            core.engine.call(lambda _: sink(core.cache, to_disk=True)).result(300)
            economy.enabled = way != "load"
            # Both rates of this document; what is measured on the way is of single steps.
            economy.prefill_tokens_per_s = document.size / cold_s
            economy.load_bytes_per_s = core.cache.layout.nbytes / slow.block_s / mover.num_readers
            if way == "compute":
                economy.load_bytes_per_s = 1.0
            elapsed_s, output = probe.ask(core, document.ask(1 + 10 * number + WAYS.index(way)))
            taken[way].append(elapsed_s)
            hits[way] = output.counts.hit
    medians = {way: statistics.median(all_) for way, all_ in taken.items()}
    return {
        "tokens": document.size,
        "cold_s": round(cold_s, 3),
        "seconds": {way: [round(each, 3) for each in all_] for way, all_ in taken.items()},
        "hit_tokens": hits,
        "faster_than": {
            way: round(medians[way] / medians["both ends"], 2)
            for way in medians
            if way != "both ends"
        },
    }


if __name__ == "__main__":
    main()
