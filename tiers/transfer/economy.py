"""Decides whether loading pays: whether a block loads faster than it is recomputed.

Pure. The engine thread passes in rates measured while running. Where an engine elsewhere computes
and a node loads, each of them measures its own `Cost`, and `worth_leading` compares them.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np

from tiers.tier import TierName

SMOOTHING = 0.2  # weight of the latest measurement in the moving averages
RETRY_EVERY = 32  # after this many refusals in a row, one load is let through to measure again
KEPT = 0.5  # of the weight of earlier measurements of a cost, at each new one
CHEAPER = 0.5  # a measurement below this share of what was expected outdates all before it
MARGIN = 0.1  # by which a block must load faster, for what nobody measures, such as one more step
STEPS_OF_KIND = 3  # that are kept, of each size and position
KINDS_OF_STEP = 32
HELD_UP = 1.25  # a step that took so much longer than one with more to do was held up
LATE = 1.5  # and so was one that took so much longer than all steps together tell
RIDGE = 5e-3  # what steps of one size leave open is the tokens', not their places'


class CostLine(NamedTuple):
    """Seconds of work: a fixed part, and one for each unit of its size."""

    fixed_s: float = 0.0
    each_s: float = 0.0


@dataclass(slots=True)
class Cost:
    """What work costs by its size: a line through the latest measurements, by least squares."""

    line: CostLine = field(default_factory=CostLine)  # free, until it was measured
    _sums: tuple[float, ...] = (0.0,) * 5  # 1, size, seconds, size², size * seconds

    def observe(self, size: float, seconds: float) -> None:
        if size <= 0 or seconds <= 0:
            return
        cheaper = seconds < CHEAPER * (self.line.fixed_s + self.line.each_s * size)
        kept = 0.0 if cheaper else KEPT
        new = (1.0, size, seconds, size * size, size * seconds)
        self._sums = tuple(kept * old + add for old, add in zip(self._sums, new, strict=True))
        n, x, y, xx, xy = self._sums
        spread = n * xx - x * x
        each_s = (n * xy - x * y) / spread if spread > 1e-3 * n * xx else y / x
        each_s = min(max(each_s, 0.0), y / x)
        self.line = CostLine((y - each_s * x) / n, each_s)


@dataclass(slots=True)
class PrefillCost:
    """What a token costs to compute at its place in a prompt: attention reads all before it.

    A step takes a fixed part, one for each token, and one for each pair of a token and one before
    it, by least squares of the relative error. The latest steps of each kind (size and place, by
    powers of two) are kept, so that many ends of prompts do not push out what a whole one took.
    The longer ago a kind was seen, the less it weighs.
    """

    token_s: float = 0.0  # with its share of the largest step's fixed part; 0: not measured
    pair_s: float = 0.0
    _steps: dict[tuple[int, int], deque[tuple[float, ...]]] = field(default_factory=dict)

    def seconds(self, start: int, end: int) -> float:
        """To compute a prompt's tokens from `start` to `end`."""
        return (end - start) * (self.token_s + self.pair_s * (start + end) / 2)

    def observe(self, parts: Sequence[tuple[int, int]], seconds: float) -> None:
        """A step took so long. `parts`: of each request, its first token and how many."""
        num_tokens = sum(num for _, num in parts)
        if num_tokens <= 0 or seconds <= 0:
            return
        pairs = sum(num * (start + num / 2) for start, num in parts)
        kind = (num_tokens.bit_length(), int(pairs / num_tokens).bit_length())
        steps = self._steps.pop(kind, None) or deque(maxlen=STEPS_OF_KIND)
        steps.append((num_tokens, pairs, seconds))
        self._steps[kind] = steps  # the last seen is the last
        if len(self._steps) > KINDS_OF_STEP:
            del self._steps[next(iter(self._steps))]
        self._fit()

    def _fit(self) -> None:
        kinds = list(reversed(self._steps.values()))
        sizes, pairs, took_s = np.array([step for steps in kinds for step in steps]).T
        weights = np.repeat(1 / np.arange(1, len(kinds) + 1), [len(steps) for steps in kinds])
        more = (sizes >= sizes[:, None]) & (pairs >= pairs[:, None])
        weights[(more & (HELD_UP * took_s < took_s[:, None])).any(axis=1)] = 0.0
        parts = np.stack((sizes, pairs, np.ones_like(sizes))) / took_s
        for _ in range(2):  # the second time without the late
            scale = np.sqrt(parts**2 @ weights)
            scaled = parts / scale[:, None]
            squares = (scaled * weights) @ scaled.T + np.diag((0, RIDGE, RIDGE))
            each_s, used = np.zeros(3), [0, 1, 2]
            while True:
                found = np.linalg.solve(squares[np.ix_(used, used)], (scaled @ weights)[used])
                if len(used) == 1 or found.min() >= 0:
                    break
                del used[int(found.argmin())]  # no part takes less than no time
            each_s[used] = found / scale[used]
            weights[each_s @ parts < 1 / LATE] = 0.0
        token_s, self.pair_s, fixed_s = map(float, each_s)
        self.token_s = token_s + fixed_s / float(sizes.max())


@dataclass(slots=True)
class LoadEconomy:
    """Compares the time to load a run of blocks with the time to compute its tokens.

    Until both rates are known, every load is worth it. A slow disk is tried again every
    `RETRY_EVERY` refusals, so a passing slowness does not turn the tier off for good.
    """

    enabled: bool = True
    load_bytes_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    refused: int = 0
    compute: PrefillCost = field(default_factory=PrefillCost)
    _in_a_row: int = 0

    def observe_load(self, nbytes: int, seconds: float) -> None:
        if nbytes and seconds > 0:
            self.load_bytes_per_s = _smooth(self.load_bytes_per_s, nbytes / seconds)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        if num_tokens and seconds > 0:
            self.prefill_tokens_per_s = _smooth(self.prefill_tokens_per_s, num_tokens / seconds)

    def worth(self, num_tokens: int, nbytes: int, num_readers: int = 1) -> bool:
        """Whether loading by so many readers at once takes no longer than computing."""
        if not self.enabled or not self.load_bytes_per_s or not self.prefill_tokens_per_s:
            return True
        load_s = nbytes / (self.load_bytes_per_s * num_readers)
        return not self.refuse(load_s > num_tokens / self.prefill_tokens_per_s)

    def worth_leading(
        self,
        tiers: Sequence[TierName],
        loads: Mapping[TierName, CostLine],
        *,
        block_bytes: float,
        block_tokens: int,
        start: int = 0,
    ) -> int:
        """How many leading blocks, which are in these tiers and begin at token `start`, should be
        loaded: as many as save the most time. `loads`: for a byte from each tier."""
        if not self.enabled or not self.compute.token_s:
            return len(tiers)
        num_blocks, end, most_s, load_s = 0, 0, 0.0, 0.0
        met: set[TierName] = set()
        for tier, run in groupby(tiers):
            num, line = len(list(run)), loads.get(tier, CostLine())
            load_s += num * block_bytes * line.each_s + (line.fixed_s if tier not in met else 0.0)
            met.add(tier)
            end += num
            saved_s = self.compute.seconds(start, start + end * block_tokens)
            if (gained_s := saved_s - (1 + MARGIN) * load_s) >= most_s:
                num_blocks, most_s = end, gained_s
        return num_blocks

    def refuse(self, is_slower: bool) -> bool:
        """Counts a decision. True if the load is refused: every so often a slower one is not."""
        self._in_a_row = self._in_a_row + 1 if is_slower else 0
        if not is_slower or self._in_a_row >= RETRY_EVERY:
            self._in_a_row = 0
            return False
        self.refused += 1
        return True


def _smooth(average: float, value: float) -> float:
    return value if not average else average + SMOOTHING * (value - average)
