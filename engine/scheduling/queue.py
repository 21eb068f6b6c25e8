"""The order in which waiting requests are admitted.

Pure. Shares (tenants) take turns by how much each has been served. Within a share, the longest
cached prefix goes first, which serves more hits before they are evicted (SGLang's cache-aware
scheduling, arXiv 2312.07104, section 3). That could pass a request by for ever, so the time of
being passed by is bounded. It counts from when the request is first passed by, not from its
arrival. If all wait longer than the bound, an order by arrival would serve fewer hits and make all
wait even longer (docs/measurements/cache.md).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator

from engine.scheduling.sequence import Sequence
from engine.scheduling.shares import ServedShares

MIN_WINDOW = 4  # sequences considered per share, however many shares there are


class WaitingQueue:
    """Waiting sequences, oldest first. Invariant: a preempted sequence is never passed by."""

    def __init__(
        self, *, max_passed_s: float, window: int = 64, served: ServedShares | None = None
    ) -> None:
        self._served = served or ServedShares()
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
        """Put a preempted sequence first."""
        self._sequences.insert(0, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a cancelled sequence."""
        self._sequences.remove(sequence)

    def admit(self, sequence: Sequence, now_ns: int) -> None:
        """Let the sequence begin to run. It passes by all of its share that have waited longer."""
        place = self._sequences.index(sequence)
        del self._sequences[place]
        for passed in self._sequences[:place]:
            if passed.share == sequence.share:
                passed.passed_ns = passed.passed_ns or now_ns

    def work(self) -> dict[str, float]:
        """The waiting work by share, in tokens."""
        if not self._sequences:
            return {}
        waiting: dict[str, float] = defaultdict(float)
        for sequence in self._sequences:
            waiting[sequence.share] += sequence.work
        return dict(waiting)

    def candidates(self, now_ns: int, num_cached: Callable[[Sequence], int]) -> list[Sequence]:
        """The sequences that may be admitted now, in order. `num_cached` gives a sequence's cached
        tokens.

        Preempted sequences come first, by age. Then the shares take turns, the least served first.
        The oldest sequences of each share are considered, `window` in all. Among them, those passed
        by for as long as the bound come first, by age. Then comes the longest cached prefix, and
        age among equals.
        """
        if len(self._sequences) < 2:
            return list(self._sequences)
        preempted = [s for s in self._sequences if s.num_preemptions]
        lines: dict[str, list[Sequence]] = defaultdict(list)
        for sequence in self._sequences:
            if not sequence.num_preemptions:
                lines[sequence.share].append(sequence)
        if not lines:
            return preempted
        length = max(MIN_WINDOW, self._window // len(lines))
        ordered = {
            share: self._in_line(line[:length], now_ns, num_cached) for share, line in lines.items()
        }
        if len(ordered) == 1:
            return [*preempted, *next(iter(ordered.values()))][: self._window]
        works = {share: [float(s.num_tokens) for s in line] for share, line in ordered.items()}
        return [*preempted, *self._served.merged(ordered, works)][: self._window]

    def _in_line(
        self, line: list[Sequence], now_ns: int, num_cached: Callable[[Sequence], int]
    ) -> list[Sequence]:
        """The sequences of one share, in order."""
        if len(line) < 2:
            return line
        bound = now_ns - self._max_passed_ns
        overdue = [s for s in line if 0 < s.passed_ns <= bound]
        rest = [s for s in line if not 0 < s.passed_ns <= bound]
        rest.sort(key=num_cached, reverse=True)  # a stable sort keeps age among equals
        return overdue + rest
