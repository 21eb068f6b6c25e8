"""What it would cost a model with sliding windows to keep less of a block than all of it.

    python tests/bench/windows.py --trace FILE [--trace FILE] [--json FILE]

One tier under LRU, in the sizes of gemma-3-27b: 19 % of a block is what layers without a window
keep. A prefix ends a hit only where the block before its end has its window part (windows of 1,024
tokens, blocks of 512: one block). Three ways: `whole`, as served; `ends`, where a prompt's last
block alone keeps its window part, and a block where prompts have parted before; `apart`, where a
window part leaves by its own recency, and is used only by a hit that ends there.

Estimate: `ends` holds five times as many blocks, so it gains while the tier is too small for the
load and loses wherever prompts part in new places. `apart` should lose nowhere.
"""

import argparse
import json
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench.provenance import commit, machine
from tiers.replay.trace import read_trace

LASTING = 0.19  # of a block; docs/models.md, "Windows"
SHARES = (0.02, 0.05, 0.10, 0.20, 0.40)  # of the distinct blocks of a trace
WAYS = ("whole", "ends", "apart")
Prompts = Sequence[Sequence[Any]]


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


def of_trace(path: Path) -> list[dict[str, Any]]:
    prompts = [request.blocks for request in read_trace(path).requests]
    distinct = len({key for prompt in prompts for key in prompt})
    rows = []
    for share in SHARES:
        rates = {way: round(hit_rate(prompts, share * distinct, way), 4) for way in WAYS}
        rows.append({"share": share, **rates})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, action="append", required=True)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = {path.name: of_trace(path) for path in arguments.trace}
    for name, rows in found.items():
        print(name)
        for row in rows:
            print("  " + "  ".join(f"{key} {value}" for key, value in row.items()))
    if arguments.json:
        told = {"commit": commit(), "machine": machine(), "lasting": LASTING, "traces": found}
        arguments.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
