"""The order in which waiting requests are admitted.

Pure. Longest cached prefix first serves more hits before they are evicted (SGLang's cache-aware
scheduling, arXiv 2312.07104, section 3), but may pass a request by for ever; so each request is
passed by for a bounded time only.
"""

from collections.abc import Callable, Iterator
from enum import StrEnum

from engine.sequence import Sequence


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
        self._sequences.remove(sequence)

    def candidates(self, now_ns: int, num_cached: Callable[[Sequence], int]) -> list[Sequence]:
        """Who may be admitted now, in order; `num_cached` tells a sequence's cached tokens.

        The oldest `window` sequences are looked at. Those that were preempted or waited longer than
        the bound come first, by age; then the longest cached prefix, and age among equals.
        """
        window = self._sequences[: self._window]
        if self._order is QueueOrder.ARRIVAL or len(window) < 2:
            return window
        bound = now_ns - self._max_passed_ns
        overdue = [s for s in window if s.num_preemptions or s.queued_ns <= bound]
        rest = [s for s in window if not s.num_preemptions and s.queued_ns > bound]
        rest.sort(key=num_cached, reverse=True)  # a stable sort keeps age among equals
        return overdue + rest
