"""Learns, while serving, when a run of blocks will be used again. The model behind `adaptive`.

The age since the last use is divided into intervals that grow by `_GROWTH`. For each interval the
model gives the probability of a reuse in it, if there was none before (a discrete hazard). It is a
logistic regression on one-hot features, trained by AdaGrad (Duchi et al., JMLR 2011) on the
outcomes. A feature has one weight for all ages, learned fast, and one for each age, learned slowly.
Little evidence then shifts the level, and much evidence changes the shape.

The hazards give the worth of keeping a block at each age: the most hits per second of residence to
be expected over any further time of keeping it. This is Gittins' index (Gittins, J. R. Stat. Soc. B
41, 1979), which LHD (Beckmann et al., NSDI 2018) calls hit density.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_FIRST_S = 2.0  # end of the first interval; traces and clocks are coarse below it
_GROWTH = 1.6
NUM_AGES = 24  # the last interval ends after 27 hours
NUM_ROWS = 16  # one-hot rows per feature
_BATCH = 32  # outcomes learned in one batch
_PRIOR_SCALE_S = 5.0  # before any evidence, the reuse rate at age a is 0.05 / (a + 5 s): LRU
_PRIOR = 0.05
_RATE = 0.1
_RATE_BY_AGE = 0.01
_CAUTION = 10.0  # AdaGrad's initial sum of squares per age; 1 for the shared weight
_TINY = 2.0**-30  # the smallest distinct worth, in hits a second: one hit in 34 years
_TINY_OCTAVE = -30
_LEVELS_PER_OCTAVE = 4
NUM_LEVELS = 128  # up to one hit in a quarter of a second

AGE_ENDS = np.array([_FIRST_S * _GROWTH**age for age in range(NUM_AGES)])
_WIDTHS = np.diff(AGE_ENDS, prepend=0.0)
_LATER = np.triu(np.ones((NUM_AGES, NUM_AGES), dtype=bool))  # [k, j]: interval j is not before k

Rows = tuple[int, ...]  # the row that each feature selects


class WaitOutcome(NamedTuple):
    """An observed part of one wait: intervals `[first, end)`, and whether the last had a reuse."""

    rows: Rows
    first: int
    end: int
    reused: bool
    weight: float


def row(value: float) -> int:
    """The row of a count or of seconds: exact from 0 to 3, by octaves above."""
    number = int(value)
    return number if number < 4 else min(2 + number.bit_length() - 1, NUM_ROWS - 1)


def interval(age_s: float) -> int:
    """The number of the interval that contains `age_s`."""
    return min(int(np.searchsorted(AGE_ENDS, age_s, side="right")), NUM_AGES - 1)


class ReuseModel:
    """The weights of `num_features` one-hot features: 80 kB, and as much again for AdaGrad's
    sums."""

    def __init__(self, num_features: int) -> None:
        shape = (num_features * NUM_ROWS, NUM_AGES)
        starts = AGE_ENDS - _WIDTHS
        hazard = 1 - (1 - _PRIOR) ** (_WIDTHS / (starts + _PRIOR_SCALE_S))
        self._offsets = np.arange(num_features) * NUM_ROWS
        self._bias = np.log(hazard / (1 - hazard))
        self._bias_sum = np.full(NUM_AGES, _CAUTION)
        self._by_age = np.zeros(shape)
        self._by_age_sum = np.full(shape, _CAUTION)
        self._shared = np.zeros(shape[0])
        self._shared_sum = np.ones(shape[0])
        self._pending: list[WaitOutcome] = []

    def levels(self, rows: Sequence[Rows]) -> list[bytes]:
        """The worth of each set of rows by interval of age, as logarithmic levels from 0 up."""
        hazards = self._hazards(np.array(rows) + self._offsets)
        alive = np.cumprod(1 - hazards, axis=1)
        before = np.concatenate([np.ones((len(rows), 1)), alive[:, :-1]], axis=1)
        waited = np.cumsum((before + alive) / 2 * _WIDTHS, axis=1)
        waited_before = waited - (before + alive) / 2 * _WIDTHS
        gains = before[:, :, None] - alive[:, None, :]  # [S, from, to]
        costs = waited[:, None, :] - waited_before[:, :, None]
        worth = np.where(_LATER, gains, 0.0) / np.where(_LATER, np.maximum(costs, _TINY), 1.0)
        octaves = np.log2(np.maximum(worth.max(axis=2), _TINY)) - _TINY_OCTAVE
        levels = np.minimum(octaves * _LEVELS_PER_OCTAVE, NUM_LEVELS - 1).astype(np.uint8)
        return [line.tobytes() for line in levels]

    def learn(self, outcome: WaitOutcome) -> None:
        """Queue an outcome. The weights are updated when a batch is full."""
        self._pending.append(outcome)
        if len(self._pending) >= _BATCH:
            self._step()

    def _hazards(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """The hazard at each age. `rows`: [S, F] -> [S, A]."""
        shared = self._shared[rows].sum(axis=1)[:, None]
        logits = self._bias + self._by_age[rows].sum(axis=1) + shared
        hazards: NDArray[np.float64] = 1 / (1 + np.exp(-np.clip(logits, -30, 30)))
        return hazards

    def _step(self) -> None:
        batch, self._pending = self._pending, []
        rows = np.array([outcome.rows for outcome in batch]) + self._offsets
        first = np.array([outcome.first for outcome in batch])[:, None]
        end = np.array([outcome.end for outcome in batch])[:, None]
        reused = np.array([outcome.reused for outcome in batch])[:, None]
        weight = np.array([outcome.weight for outcome in batch])[:, None]
        ages = np.arange(NUM_AGES)
        seen = (ages >= first) & (ages < end)
        happened = reused & (ages == end - 1)
        errors = np.where(seen, happened - self._hazards(rows), 0.0) * weight  # [S, A]
        self._bias_sum += (errors**2).sum(axis=0)
        self._bias += _RATE_BY_AGE * errors.sum(axis=0) / np.sqrt(self._bias_sum)
        flat = rows.ravel()
        touched, places = np.unique(flat, return_inverse=True)
        spread = np.zeros((len(touched), len(batch)))  # counts of each touched row by outcome
        np.add.at(spread, (places, np.repeat(np.arange(len(batch)), rows.shape[1])), 1.0)
        self._by_age_sum[touched] += spread @ errors**2
        self._by_age[touched] += (
            _RATE_BY_AGE * (spread @ errors) / np.sqrt(self._by_age_sum[touched])
        )
        totals = errors.sum(axis=1)
        self._shared_sum[touched] += spread @ totals**2
        self._shared[touched] += _RATE * (spread @ totals) / np.sqrt(self._shared_sum[touched])
