"""The order in which waiting requests are admitted.

Pure. Longest cached prefix first serves more hits before they are evicted (SGLang's cache-aware
scheduling, arXiv 2312.07104, section 3), but may pass a request by for ever; so each request is
passed by for a bounded time only. The time counts from when it is first passed by, not from its
arrival: where all wait longer than the bound, an order by arrival would serve fewer hits and let
all wait longer still (DESIGN.md, "Measured").
"""

from collections.abc import Callable, Iterator
from enum import StrEnum

from engine.scheduling.sequence import Sequence


class QueueOrder(StrEnum):
    """How waiting requests are ordered."""

    ARRIVAL = "arrival"
    CACHED_FIRST = "cached_first"


class WaitingQueue:
    """Sequences that wait, oldest first. Invariant: no sequence that was preempted is passed by."""

    def __init__(self, order: QueueOrder, *, max_passed_s: float, window: int = 64) -> None:
        self._order = order
        self._max_passed_ns = int(max_passed_s * 1e9)
        self._window = window
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def add(self, sequence: Sequence) -> None:
        self._sequences.append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """A preempted sequence goes first."""
        self._sequences.insert(0, sequence)

    def remove(self, sequence: Sequence) -> None:
        """The sequence was cancelled."""
        self._sequences.remove(sequence)

    def admit(self, sequence: Sequence, now_ns: int) -> None:
        """The sequence begins to run, and passes by all that wait longer."""
        place = self._sequences.index(sequence)
        del self._sequences[place]
        for passed in self._sequences[:place]:
            passed.passed_ns = passed.passed_ns or now_ns

    def candidates(self, now_ns: int, num_cached: Callable[[Sequence], int]) -> list[Sequence]:
        """Who may be admitted now, in order; `num_cached` tells a sequence's cached tokens.

        The oldest `window` sequences are looked at. Those that were preempted, or were passed by
        for as long as the bound, come first, by age; then the longest cached prefix, and age among
        equals.
        """
        window = self._sequences[: self._window]
        if self._order is QueueOrder.ARRIVAL or len(window) < 2:
            return window
        bound = now_ns - self._max_passed_ns
        overdue: list[Sequence] = []
        rest: list[Sequence] = []
        for sequence in window:
            long_passed = 0 < sequence.passed_ns <= bound
            (overdue if long_passed or sequence.num_preemptions else rest).append(sequence)
        rest.sort(key=num_cached, reverse=True)  # a stable sort keeps age among equals
        return overdue + rest
