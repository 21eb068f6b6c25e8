"""What a model with sliding windows gains by keeping less of a block than all of it.

    python tests/bench/windows.py --trace FILE [--trace FILE] [--served] [--host] [--device]
        [--engine] [--json FILE]

One tier under LRU, in the sizes of gemma-3-27b: 19 % of a block is what layers without a window
keep. A prefix ends a hit only where the block before its end has its window part (windows of 1,024
tokens, blocks of 512: one block). Three ways: `whole`; `ends`, where a prompt's last block alone
keeps its window part, and a block where prompts have parted before; `apart`, as the disk does it,
where a window part leaves by its own recency, and is used only by a hit that ends there.

Estimate: `ends` holds five times as many blocks, so it gains while the tier is too small for the
load and loses wherever prompts part in new places. `apart` should lose nowhere.

With `--served`, each trace also goes through the real disk tier, with blocks in one record and in
two: look up, load what a hit needs, store the rest. The replay beside it is given the bytes that
the tier held at the end, because a disk keeps some of its pages free. Expected: two points or less
between the two. Measured: 2.8 at most.

With `--host`, each trace goes through the real cache without a disk: a device for the longest
prompt, and a host of the share, in whole slots and frames and in those that are cut.

With `--device`, each trace goes through the real cache without a host: a device of the share, or
for the longest prompt if that is more, in whole slots and in slots that are cut. In these sizes,
and in those of gpt-oss, half of whose layers have windows.

With `--engine`, real engines of tiny models serve eight conversations of 20 blocks, each twice, and
then once more, newest first, from a device of 60 blocks: how many tokens it holds, and how many of
the last prompts it serves, in whole slots and in slots that are cut.
"""

import argparse
import json
import random
import sys
import tempfile
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench.provenance import commit, machine
from tests.bench.served import serve, settle
from tests.parity import test_architectures
from tests.parity.test_engine_tiers import BLOCK, House
from tests.parity.test_windows import windowed
from tiers.blocks import layout as layouts
from tiers.blocks.chain import Chain
from tiers.blocks.frames import FrameArena
from tiers.blocks.keys import CacheScope
from tiers.blocks.layout import BlockLayout, LayerLayout
from tiers.blocks.part import Part
from tiers.cache import CacheSettings, TieredCache
from tiers.disk.open import open_disk
from tiers.replay.trace import read_trace
from tiers.tier import TierName

LASTING = 0.19  # of a block; docs/models.md, "Windows"
SHARES = (0.02, 0.05, 0.10, 0.20, 0.40)  # of the distinct blocks of a trace
WAYS = ("whole", "ends", "apart")
Prompts = Sequence[Sequence[Any]]
TOKENS, AT_ONCE = 4, 8  # in a block; blocks loaded or stored together
ROOT = CacheScope(tenant=b"bench").root()
# A page for a block without its window part and four pages for that.
FULL, SLIDING = LayerLayout(1, 224, 224), LayerLayout(1, 224, 224, window=TOKENS)
LAYOUT = BlockLayout((FULL, *[SLIDING] * 4), TOKENS, "float16")
HALF = BlockLayout((FULL, SLIDING), TOKENS, "float16")
RECORD_BYTES = 5 * 4096 + 700  # with its places in the indexes


class Tier:
    """Two recencies: of blocks, and of the window parts of some of them. Oldest first."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.used = 0.0
        self.blocks: OrderedDict[Any, int] = OrderedDict()
        self.windows: OrderedDict[Any, int] = OrderedDict()

    def match(self, prompt: Sequence[Any]) -> tuple[int, int]:
        """How many leading blocks are held, and how many of these a hit may have."""
        held = next((n for n, key in enumerate(prompt) if key not in self.blocks), len(prompt))
        served = next((n for n in range(held, 0, -1) if prompt[n - 1] in self.windows), 0)
        return held, served

    def use(self, key: Any, now: int, *, window: bool) -> None:
        self.used += 0 if key in self.blocks else LASTING
        self.blocks[key] = now
        self.blocks.move_to_end(key)
        if window:
            self.used += 0 if key in self.windows else 1 - LASTING
            self.windows[key] = now
            self.windows.move_to_end(key)

    def shrink(self, *, apart: bool) -> None:
        while self.used > self.capacity:
            oldest, then = next(iter(self.blocks.items()))
            part, used = next(iter(self.windows.items()), (None, then + 1))
            if apart and used <= then:
                del self.windows[part]
                self.used -= 1 - LASTING
                continue
            del self.blocks[oldest]
            self.used -= LASTING
            if self.windows.pop(oldest, None) is not None:
                self.used -= 1 - LASTING


def hit_rate(prompts: Prompts, capacity: float, way: str) -> float:
    """Of all blocks, those that were served."""
    tier, served, total = Tier(capacity), 0, 0
    for now, prompt in enumerate(prompts):
        held, hit = tier.match(prompt)
        served, total = served + hit, total + len(prompt)
        last = len(prompt) - 1
        for number in range(last, -1, -1):  # a prefix is younger than what continues it
            key = prompt[number]
            window = {
                "whole": True,
                "ends": number == last or key in tier.windows or hit <= number == held - 1,
                "apart": number >= hit - 1,  # read, or computed
            }[way]
            tier.use(key, now, window=window)
        tier.shrink(apart=way == "apart")
    return served / total


def served(prompts: Prompts, capacity: float, *, apart: bool) -> tuple[float, float]:
    """Of all blocks, those that the real disk tier served, and how many it held at the end, by
    their bytes."""
    kept, layouts.APART_SHARE = layouts.APART_SHARE, layouts.APART_SHARE if apart else 2
    numbers: dict[Any, int] = {}
    hits = 0
    arena = FrameArena(LAYOUT, AT_ONCE)
    frames = [frame for frame in (arena.take() for _ in range(AT_ONCE)) if frame is not None]
    for number, frame in enumerate(frames):  # not compressible
        frame.buffer[:] = random.Random(number).randbytes(LAYOUT.nbytes)
    try:
        with tempfile.TemporaryDirectory() as folder:
            tier = open_disk(Path(folder), LAYOUT, int(capacity * RECORD_BYTES))
            for prompt in prompts:
                firsts = [numbers.setdefault(key, len(numbers)) * TOKENS for key in prompt]
                tokens = array("i", (first + n for first in firsts for n in range(TOKENS)))
                chain = Chain(ROOT, tokens, TOKENS)
                ids = chain.block_ids(0, len(chain.keys))
                held = tier.probe(ids)
                there = tier.have_windows(ids[:held])
                hit = next((n for n in range(held, 0, -1) if there[n - 1]), 0)
                hits += hit
                for start in reversed(range(0, hit, AT_ONCE)):  # the tail is the oldest
                    end = min(hit, start + AT_ONCE)
                    for number, frame in enumerate(frames, start):
                        frame.part = Part.WHOLE if number == hit - 1 else Part.LASTING
                    assert end - start == tier.load(ids[start:end], frames).num_blocks
                for frame in frames:
                    frame.part = Part.WHOLE
                for start in reversed(range(hit, len(ids), AT_ONCE)):
                    tier.store(ids[start : start + AT_ONCE], frames[: len(ids) - start])
            tier.flush()
            held_bytes = tier.stats().logical_bytes
            tier.close()
    finally:
        layouts.APART_SHARE = kept
    return round(hits / sum(map(len, prompts)), 4), held_bytes / LAYOUT.nbytes


def hosted(prompts: Prompts, capacity: float, *, apart: bool) -> tuple[float, float, int]:
    """Of all blocks, those that a real host and the device above it served, and how many blocks the
    host held at the end."""
    kept, layouts.APART_SHARE = layouts.APART_SHARE, layouts.APART_SHARE if apart else 2
    longest, numbers = max(map(len, prompts)), dict[Any, int]()
    sizes = CacheSettings(
        device_bytes=(longest + 8) * LAYOUT.nbytes, host_bytes=int(capacity * LAYOUT.nbytes)
    )
    hits: Counter[TierName] = Counter()
    try:
        cache = TieredCache(LAYOUT, sizes)
        cache.start()
        for prompt in prompts:
            firsts = [numbers.setdefault(key, len(numbers)) * TOKENS for key in prompt]
            tokens = array("i", (first + n for first in firsts for n in range(TOKENS)))
            hits.update(serve(cache, Chain(ROOT, tokens, TOKENS)))
            settle(cache)
        held = cache.stats().host.num_blocks
        cache.close()
    finally:
        layouts.APART_SHARE = kept
    total = TOKENS * sum(map(len, prompts))
    host, device = (round(hits[tier] / total, 4) for tier in (TierName.HOST, TierName.DEVICE))
    return host, device, held


def on_device(
    prompts: Prompts, capacity: float, layout: BlockLayout, *, apart: bool
) -> tuple[float, int]:
    """Of all blocks, those that a real device served, and how many blocks it held at the end."""
    kept, layouts.APART_SHARE = layouts.APART_SHARE, layouts.APART_SHARE if apart else 2
    numbers: dict[Any, int] = {}
    hits = 0
    try:
        cache = TieredCache(
            layout, CacheSettings(device_bytes=int(capacity) * layout.nbytes, host_bytes=0)
        )
        for prompt in prompts:
            firsts = [numbers.setdefault(key, len(numbers)) * TOKENS for key in prompt]
            tokens = array("i", (first + n for first in firsts for n in range(TOKENS)))
            hits += serve(cache, Chain(ROOT, tokens, TOKENS)).get(TierName.DEVICE, 0)
        held = cache.stats().device.num_blocks
        cache.residency.check()
        cache.close()
    finally:
        layouts.APART_SHARE = kept
    return round(hits / TOKENS / sum(map(len, prompts)), 4), held


def in_engine(model_type: str, *, apart: bool) -> dict[str, int]:
    """Tokens on a real engine's device after eight conversations, and hits there on all of them."""
    kept, layouts.APART_SHARE = layouts.APART_SHARE, layouts.APART_SHARE if apart else 2
    prompts = [test_architectures.prompt(20 * BLOCK + 11, seed=seed) for seed in range(8)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            house = House(
                windowed(model_type),
                Path(folder),
                device_blocks=60,
                host_blocks=64,
                share_tails=False,
            )
            for tokens in prompts:
                for _ in range(2):
                    house.ask([tokens])
                    house.engine.call(lambda _: house.cache.flush()).result(60)
            slots = [block.slot for block in house.cache.index]
            held = BLOCK * sum(slot is not None for slot in slots)
            hits = sum(house.ask([tokens])[0][1].hit_device for tokens in reversed(prompts))
            house.close()
    finally:
        layouts.APART_SHARE = kept
    return {"held": held, "hits": hits, "asked": sum(map(len, prompts))}


def of_trace(
    path: Path, shares: Sequence[float], *, serves: bool, hosts: bool, devices: bool
) -> list[dict[str, Any]]:
    prompts = [tuple(dict.fromkeys(request.blocks)) for request in read_trace(path).requests]
    distinct = len({key for prompt in prompts for key in prompt})
    rows = []
    for share in shares:
        rates = {way: round(hit_rate(prompts, share * distinct, way), 4) for way in WAYS}
        row: dict[str, Any] = {"share": share, **rates}
        if serves:
            capacity = share * distinct
            for way in ("whole", "apart"):
                rate, held = served(prompts, capacity, apart=way == "apart")
                row[f"served {way}"] = rate
                row[f"held {way}"] = round(held)
                row[f"replayed {way}"] = round(hit_rate(prompts, held, way), 4)
        for way in ("whole", "apart") if hosts else ():
            rate, above, held = hosted(prompts, share * distinct, apart=way == "apart")
            row[f"host {way}"], row[f"host held {way}"] = rate, held
            row[f"device above {way}"] = above
        room = max(share * distinct, 8 + max(map(len, prompts)))
        for name, layout in {"gemma": LAYOUT, "gpt-oss": HALF}.items() if devices else ():
            row["slots"] = int(room)
            for way in ("whole", "apart"):
                rate, held = on_device(prompts, room, layout, apart=way == "apart")
                row[f"{name} {way}"], row[f"{name} held {way}"] = rate, held
        rows.append(row)
        print("  " + "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, action="append", default=[])
    parser.add_argument("--share", type=float, action="append", help="only these capacities")
    parser.add_argument("--served", action="store_true", help="also by the real disk tier")
    parser.add_argument("--host", action="store_true", help="also by the real host, without a disk")
    parser.add_argument("--device", action="store_true", help="also by the real device alone")
    parser.add_argument("--engine", action="store_true", help="also by engines of tiny models")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = {}
    for path in arguments.trace:
        print(path.name)
        found[path.name] = of_trace(
            path,
            arguments.share or SHARES,
            serves=arguments.served,
            hosts=arguments.host,
            devices=arguments.device,
        )
    engines = {
        f"{model_type} {way}": in_engine(model_type, apart=way == "apart")
        for model_type in (("gemma3_text", "gpt_oss") if arguments.engine else ())
        for way in ("whole", "apart")
    }
    for name, told_of in engines.items():
        print(name, told_of)
    if arguments.json:
        told = {"commit": commit(), "machine": machine(), "lasting": LASTING, "traces": found}
        told["engines"] = engines
        arguments.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
