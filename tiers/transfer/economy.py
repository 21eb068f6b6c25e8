"""Decides whether loading pays: whether a block loads faster than it is recomputed.

Pure. The engine thread passes in rates measured while running. Where an engine elsewhere computes
and a node loads, each of them measures its own `Cost`, and `worth_leading` compares them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from tiers.tier import TierName

SMOOTHING = 0.2  # weight of the latest measurement in the moving averages
RETRY_EVERY = 32  # after this many refusals in a row, one load is let through to measure again
KEPT = 0.5  # of the weight of earlier measurements of a cost, at each new one
CHEAPER = 0.5  # a measurement below this share of what was expected outdates all before it
MARGIN = 0.1  # by which a block must load faster, for what nobody measures, such as one more step
TRIAL_SHARE = 1 / 20  # of a refused prompt, that is loaded to measure again


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
class LoadEconomy:
    """Compares the time to load a run of blocks with the time to compute its tokens.

    Until both rates are known, every load is worth it. A slow disk is tried again every
    `RETRY_EVERY` refusals, so a passing slowness does not turn the tier off for good.
    """

    enabled: bool = True
    load_bytes_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    refused: int = 0
    compute: Cost = field(default_factory=Cost)  # of a token
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
    ) -> int:
        """How many leading blocks, which are in these tiers, should be loaded: as many as save the
        most time. Some more if it is time to measure again. `loads`: for a byte from each tier."""
        token_s = self.compute.line.each_s
        if not self.enabled or not token_s:
            return len(tiers)
        num_blocks, end, most_s, saved_s = 0, 0, 0.0, 0.0
        met: set[TierName] = set()
        for tier, run in groupby(tiers):
            num, line = len(list(run)), loads.get(tier, CostLine())
            load_s = num * block_bytes * line.each_s + (line.fixed_s if tier not in met else 0.0)
            met.add(tier)
            end += num
            saved_s += num * block_tokens * token_s - (1 + MARGIN) * load_s
            if saved_s >= most_s:
                num_blocks, most_s = end, saved_s
        if num_blocks < len(tiers) and self._in_a_row >= RETRY_EVERY - 1:
            num_blocks = min(len(tiers), num_blocks + max(1, int(TRIAL_SHARE * len(tiers))))
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
