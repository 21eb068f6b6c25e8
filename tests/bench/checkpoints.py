"""Which checkpoints of recurrent states pay: the hit rate of each choice, by replay.

    python tests/bench/checkpoints.py --trace FILE [--trace FILE] [--json FILE]

One tier holds the blocks and the checkpoints of a model, each group under LRU in its part of the
bytes, or both under one order. A prompt resumes at the longest checkpoint whose blocks are all
held. Where checkpoints are taken is asked of the server's own code (`tiers.policy.checkpoints`).
A block is 512 tokens, as in the traces. An answer's blocks are those of the next turn, where a
later prompt continues this one; else they are its own, and nobody asks for them again.

Estimate: a checkpoint of Qwen3-Next is as large as 6 blocks, so keeping all of them leaves a
seventh of the tier to blocks. Prompt ends and stops are one or two for each request. A stride adds
as many bytes as the blocks themselves, which a quarter of the tier cannot hold: it should lose.
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench.provenance import commit, machine
from tiers.cache import CHECKPOINT_SHARE
from tiers.policy.checkpoints import STRIDE, keeps_stop, positions, worth_blocks
from tiers.replay.trace import Trace, read_trace

CAPACITIES = (0.02, 0.05, 0.10, 0.20)  # of the bytes of a trace's distinct blocks
NEVER = 1 << 60
Key = Hashable


@dataclass(frozen=True)
class Model:
    """Bytes of KV a token and of a checkpoint, with states in float32 and the rest in bfloat16."""

    name: str
    token_bytes: int
    checkpoint_bytes: int


MODELS = (
    # 12 of 48 layers attend: 2 heads of 256. 36 gated delta nets: 32 states of 128 x 128.
    Model("Qwen3-Next-80B", 12 * 2 * 2 * 256 * 2, 36 * (32 * 128 * 128 * 4 + 8192 * 4 * 2)),
    # 4 of 52 layers attend: 8 heads of 128. 24 are Mamba 2: 128 states of 64 x 128.
    Model("Nemotron-H-8B", 4 * 2 * 8 * 128 * 2, 24 * (128 * 64 * 128 * 4 + 10240 * 4 * 2)),
    # 7 of 27 layers keep a latent of 576. 20 delta attentions: 32 states of 128 x 128.
    Model("Kimi-Linear-48B", 7 * 576 * 2, 20 * (32 * 128 * 128 * 4 + 3 * 4096 * 4 * 2)),
    # 6 of 16 layers attend: 8 heads of 64. 10 short convolutions of 2,048: three rows.
    Model("LFM2-1.2B", 6 * 2 * 8 * 64 * 2, 10 * 2048 * 3 * 2),
)


@dataclass(frozen=True)
class Prompt:
    """`keys` of its blocks, then those that its answer fills. `end` is the longest position at
    which it can be resumed, in blocks."""

    keys: tuple[Key, ...]
    num_blocks: int
    num_tokens: int
    end: int


def prompts_of(trace: Trace) -> list[Prompt]:
    size = trace.block_tokens
    requests = trace.requests
    with_key: defaultdict[Key, list[int]] = defaultdict(list)
    for number, request in enumerate(requests):
        for key in request.blocks:
            with_key[key].append(number)
    found = []
    for number, request in enumerate(requests):
        full = min(request.input_tokens // size, len(request.blocks))
        stop = (request.input_tokens + request.output_tokens) // size
        keys = request.blocks[:full]
        if stop > full:
            fresh = full and with_key[keys[-1]][0] == number  # else whose turn comes is unknown
            later = with_key[keys[-1]][1:] if fresh else []
            other = request.blocks[full] if len(request.blocks) > full else None
            turns = (requests[each].blocks for each in later)
            own = tuple(("answer", number, each) for each in range(full, stop))
            keys += next((t[full:stop] for t in turns if len(t) > stop and t[full] != other), own)
        end = (request.input_tokens - 1) // size
        found.append(Prompt(keys, full, request.input_tokens, min(end, full)))
    return found


def resumed_at(prompts: Sequence[Prompt]) -> Mapping[Key, list[int]]:
    """The requests that would resume best at each block, the latest first, had all been kept."""
    seen: set[Key] = set()
    uses: defaultdict[Key, list[int]] = defaultdict(list)
    for number, prompt in enumerate(prompts):
        known = prompt.keys[: prompt.end]
        held = next((n for n, key in enumerate(known) if key not in seen), len(known))
        if held:
            uses[known[held - 1]].append(number)
        seen.update(prompt.keys)
    for numbers in uses.values():
        numbers.reverse()
    return uses


@dataclass(frozen=True)
class Way:
    """A choice of checkpoints, and how the tier is shared."""

    stride: int | None = STRIDE  # None: no stride
    forks: bool = True
    goes_on: bool = True  # a prompt that continues what is held parts from it too
    stops: float = 1.0  # times the server's length of an answer that is kept
    every: bool = False
    oracle: bool = False
    share: float | None = CHECKPOINT_SHARE  # None: one order of both groups
    linked: bool = False  # a checkpoint leaves with its block


@dataclass
class Group:
    """Items by recency, the oldest first, and when each was used and how deep it is."""

    nbytes: int
    capacity: float
    items: dict[Key, tuple[int, int]] = field(default_factory=dict)

    def use(self, key: Key, now: int, depth: int) -> None:
        self.items.pop(key, None)
        self.items[key] = now, depth

    def oldest(self) -> tuple[int, int]:
        now, depth = next(iter(self.items.values()), (NEVER, 0))
        return now, -depth

    @property
    def used(self) -> int:
        return self.nbytes * len(self.items)


class Tier:
    """Blocks and checkpoints in one tier of `capacity` bytes."""

    def __init__(self, capacity: float, model: Model, block_tokens: int, way: Way) -> None:
        share = way.share
        block_bytes = model.token_bytes * block_tokens
        self.way = way
        self.capacity = capacity
        self.blocks = Group(block_bytes, capacity * (1 - (share or 0)))
        self.states = Group(model.checkpoint_bytes, capacity * (share or 1))
        self.parents: dict[Key, Key] = {}  # of held blocks
        self.children: Counter[Key] = Counter()
        self.worth = worth_blocks(model.checkpoint_bytes, block_bytes)

    def resume(self, prompt: Prompt) -> tuple[int, int]:
        """How many leading blocks are held, and at which a checkpoint is."""
        blocks, states = self.blocks.items, self.states.items
        keys = prompt.keys[: prompt.num_blocks]
        held = next((n for n, key in enumerate(keys) if key not in blocks), len(keys))
        most = min(held, prompt.end)
        return held, next((n for n in range(most, 0, -1) if keys[n - 1] in states), 0)

    def use(self, keys: Sequence[Key], now: int) -> None:
        """Use blocks and add those that are new. A prefix is younger than what continues it."""
        for number in range(len(keys), 0, -1):
            key = keys[number - 1]
            if key not in self.blocks.items and number > 1:
                self.parents[key] = keys[number - 2]
                self.children[keys[number - 2]] += 1
            self.blocks.use(key, now, number)

    def wanted(self, prompt: Prompt, start: int, parts: int, block_tokens: int) -> set[int]:
        """Where the server takes checkpoints of this prompt, or what `way` changes about it."""
        way, stop = self.way, len(prompt.keys)
        if way.every:
            return set(range(start + 1, stop + 1))
        tokens, worth = prompt.num_tokens, self.worth
        parts = parts if self._forks(prompt.keys[:parts]) else 0
        if way.stride == STRIDE:
            chosen = positions(start, tokens, block_tokens, worth=worth, parts=parts)
        else:
            chosen = positions(start, tokens, block_tokens, worth=NEVER, parts=parts)
            if way.stride is not None:
                chosen |= set(range(way.stride * worth, prompt.end, way.stride * worth))
        if way.stops < inf and keeps_stop(
            stop, tokens, block_tokens, worth=round(way.stops * worth)
        ):
            chosen.add(stop)
        return {number for number in chosen if start < number <= stop}

    def _forks(self, held: Sequence[Key]) -> bool:
        if not self.way.forks or not held:
            return False
        return self.way.goes_on or bool(self.children[held[-1]])

    def shrink(self) -> None:
        if self.way.share is None:
            while self.blocks.used + self.states.used > self.capacity:
                state_first = self.states.oldest() <= self.blocks.oldest()
                self._drop(self.states if state_first else self.blocks)
            return
        for group in (self.blocks, self.states):
            while group.used > group.capacity:
                self._drop(group)

    def _drop(self, group: Group) -> None:
        key = next(iter(group.items))
        del group.items[key]
        if group is self.blocks:
            self.children[self.parents.pop(key, None)] -= 1
            if self.way.linked:
                self.states.items.pop(key, None)


def hit_rate(
    prompts: Sequence[Prompt], capacity: float, model: Model, block_tokens: int, way: Way
) -> float:
    """Of all prompt tokens, those that were not computed."""
    tier = Tier(capacity, model, block_tokens, way)
    uses = {key: list(each) for key, each in resumed_at(prompts).items()} if way.oracle else {}
    saved = total = 0
    for now, prompt in enumerate(prompts):
        held, start = tier.resume(prompt)
        saved, total = saved + start * block_tokens, total + prompt.num_tokens
        keys = prompt.keys
        if way.oracle:
            for key in keys:
                while (left := uses.get(key)) and left[-1] <= now:
                    left.pop()
            chosen = {n for n in range(1, len(keys) + 1) if uses.get(keys[n - 1])}
            chosen = {n for n in chosen if n > start or keys[n - 1] in tier.states.items}
        else:
            chosen = tier.wanted(prompt, start, held, block_tokens)
        tier.use(keys, now)
        for number in sorted(chosen | ({start} if start else set()), reverse=True):
            tier.states.use(keys[number - 1], now, number)
        if way.oracle:
            _only_used(tier, uses)
        tier.shrink()
    return saved / total


def _only_used(tier: Tier, uses: Mapping[Key, list[int]]) -> None:
    """Order checkpoints by their next use, the furthest first; those without one go."""
    left = {key: at for key, at in tier.states.items.items() if uses.get(key)}
    if len(left) * tier.states.nbytes > tier.states.capacity:
        left = dict(sorted(left.items(), key=lambda item: -uses[item[0]][-1]))
    tier.states.items = left


WAYS: Mapping[str, Way] = {
    "served": Way(),
    "stride 1, every stop": Way(stride=1, stops=0),  # served until this was measured
    "no stride": Way(stride=None),
    "every stop": Way(stops=0),
    "no forks": Way(forks=False),
    "forks alone": Way(goes_on=False),
    "prompt ends": Way(stride=None, forks=False, stops=inf),
    "every block": Way(every=True),
    "an eighth": Way(share=1 / 8),
    "three eighths": Way(share=3 / 8),
    "one order": Way(share=None),
    "oracle": Way(oracle=True, linked=True),
}


def of_trace(
    path: Path, models: Sequence[Model], ways: Mapping[str, Way], shares: Sequence[float]
) -> dict[str, Any]:
    """Per model and share of the distinct blocks' bytes: the hit rate of each way."""
    trace = read_trace(path)
    prompts, size = prompts_of(trace), trace.block_tokens
    distinct = trace.working_set_blocks() * size
    found: dict[str, Any] = {}
    for model in models:
        print(f"{path.name}, {model.name}", flush=True)
        rows = []
        for share in shares:
            room = share * distinct * model.token_bytes
            rates = {
                name: round(hit_rate(prompts, room, model, size, way), 4)
                for name, way in ways.items()
            }
            rows.append({"capacity": share, **rates})
            print(
                "  ", "  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True
            )
        found[model.name] = rows
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, action="append", required=True)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = {path.name: of_trace(path, MODELS, WAYS, CAPACITIES) for path in arguments.trace}
    if arguments.json:
        told = {"commit": commit(), "machine": machine(), "traces": found}
        arguments.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
