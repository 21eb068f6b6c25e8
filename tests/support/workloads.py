"""Synthetic request traces from a seed. Policies are tested and compared on them without a file."""

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, islice

from tiers.replay.trace import MOONCAKE_BLOCK_TOKENS, Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class Load:
    """Conversations that begin at a steady rate, continue with a probability, and pause between
    turns. Numbers of blocks are means, and times too."""

    begin_per_s: float
    prompt_blocks: float
    go_on: float = 0.0
    pause_s: float = 1.0
    turn_blocks: float = 1.0
    shared: int = 0  # beginnings that prompts share, chosen by a power law
    shared_blocks: int = 0
    shift_s: float = math.inf  # time after which other beginnings become popular


def chat(per_s: float) -> Load:
    return Load(per_s, 12, 0.6, pause_s=60, turn_blocks=3, shared=20, shared_blocks=4)


def agents(per_s: float) -> Load:
    """Tool loops: many quick steps on one growing context, then nothing more."""
    return Load(per_s, 16, 0.95, pause_s=8, turn_blocks=2, shared=1, shared_blocks=8)


def scan(per_s: float) -> Load:
    """Prompts that never repeat: a batch job over documents."""
    return Load(per_s, 20)


def documents(per_s: float, number: int = 400, shift_s: float = math.inf) -> Load:
    """Questions about a few documents."""
    return Load(per_s, 1, shared=number, shared_blocks=24, shift_s=shift_s)


def make_trace(name: str, loads: Sequence[Load], *, duration_s: float, seed: int) -> Trace:
    """Loads merged into one trace, with requests in order of time."""
    ids = count()
    events = [
        event
        for number, load in enumerate(loads)
        for event in _requests(load, random.Random(f"{seed}:{number}"), ids, duration_s)
    ]
    requests = []
    for time_s, chain in sorted(events):
        last = 1 + chain[-1] * 7919 % MOONCAKE_BLOCK_TOKENS  # the last block is partly filled
        tokens = (len(chain) - 1) * MOONCAKE_BLOCK_TOKENS + last
        requests.append(TraceRequest(time_s, tokens, tuple(chain), 300))
    return Trace(name, requests)


def _requests(
    load: Load, rng: random.Random, ids: Iterator[int], duration_s: float
) -> Iterator[tuple[float, list[int]]]:
    def fresh(mean: float) -> list[int]:
        return list(islice(ids, 1 + int(rng.expovariate(1 / mean))))

    shelf = [list(islice(ids, load.shared_blocks)) for _ in range(load.shared)] or [[]]
    popular = list(accumulate(1 / rank for rank in range(1, len(shelf) + 1)))
    shift_s, ahead = load.shift_s, [(rng.expovariate(load.begin_per_s), list[int]())]
    while ahead[0][0] < duration_s:
        time_s, chain = heapq.heappop(ahead)
        if not chain:  # another conversation begins
            heapq.heappush(ahead, (time_s + rng.expovariate(load.begin_per_s), []))
            if time_s >= shift_s:
                rng.shuffle(shelf)
                shift_s += load.shift_s
            chain = rng.choices(shelf, cum_weights=popular)[0] + fresh(load.prompt_blocks)
        yield time_s, chain
        if rng.random() < load.go_on:
            pause_s = rng.expovariate(1 / load.pause_s)
            heapq.heappush(ahead, (time_s + pause_s, chain[:-1] + fresh(load.turn_blocks)))
