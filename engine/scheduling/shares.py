"""Counts how much each share was served, to divide the engine's time between active shares.

A share is an opaque name, such as a tenant's. Service is counted in tokens of work, and the least
served share goes first (start-time fair queueing: Goyal, Vin and Cheng 1996). A returning share is
not compensated for its absence, except for a first prompt. A share that asks for less than its part
is therefore served at once, like the sparse flows of FQ-CoDel (RFC 8290). Pure. Engine thread only.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, TypeVar

CREDIT = 2048.0  # tokens of work that a share may be behind when it becomes active: some prompts
MIN_WINDOW_S = 0.5  # the shortest measurement
MAX_WINDOW_S = 10.0
MIN_BEGUN = 4  # requests in one measurement, so that one long request is not the rate
SMOOTHING = 0.4
Item = TypeVar("Item")


class ServedShares:
    """Work by share.

    Invariant: an active share's count is at least that of the least served share at the moment it
    became active, minus `CREDIT`. Credit returns only as fast as the others are served, so leaving
    and returning gains nothing.
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._active: Counter[str] = Counter()
        self._floor = 0.0
        self._first: str | None = None
        self.several = False  # whether more than one share has been seen

    def __getitem__(self, share: str) -> float:
        """What the share has been served, from an arbitrary origin."""
        return self._served.get(share, self._floor - CREDIT)

    def enter(self, share: str) -> None:
        """Count one more waiting or running sequence of the share."""
        if self._first is None:
            self._first = share
        self.several = self.several or share != self._first
        if not self._active[share]:
            self._raise_floor()
            self._served[share] = max(self[share], self._floor - CREDIT)
        self._active[share] += 1

    def leave(self, share: str) -> None:
        """Count one sequence less."""
        self._raise_floor()
        self._active[share] -= 1
        if not self._active[share]:
            del self._active[share]
            self._forget()

    def charge(self, share: str, work: float) -> None:
        self._served[share] = self[share] + work

    def _raise_floor(self) -> None:
        active = [self._served[share] for share in self._active if share in self._served]
        self._floor = max(self._floor, min(active, default=self._floor))

    def _forget(self) -> None:
        """Drop idle shares that would begin again with all their credit anyway."""
        least = self._floor - CREDIT
        for share in [s for s, served in self._served.items() if served <= least]:
            if share not in self._active:
                del self._served[share]

    def merged(
        self, lines: Mapping[str, list[Item]], works: Mapping[str, Iterable[float]]
    ) -> Iterator[Item]:
        """Merge the items of all lines, keeping each line's order.

        The next item is of the line that would be served least once all items before it were.
        `works[share]` holds the items' work.
        """
        served = {share: self[share] for share in lines}
        left = {share: iter(zip(lines[share], works[share], strict=True)) for share in lines}
        while left:
            share = min(left, key=served.__getitem__)  # the first among equals is the oldest line
            item, work = next(left[share], (None, 0.0))
            if item is None:
                del left[share]
                continue
            served[share] += work
            yield item


class Backlog(NamedTuple):
    """The waiting work by share, and how fast such work begins. A snapshot for any thread."""

    waiting: Mapping[str, float] = MappingProxyType({})  # tokens to compute
    tokens_per_s: float | None = None  # None: not measured yet

    def wait_s(self, share: str, num_tokens: float) -> float:
        """How long a request of `share` with `num_tokens` to compute would wait to begin.

        All waiting work of its own share comes first. So does that of each other share, but at most
        as much as its own share is served in that time.
        """
        if not self.waiting or not self.tokens_per_s:
            return 0.0
        own = self.waiting.get(share, 0.0)
        others = (work for name, work in self.waiting.items() if name != share)
        return (own + sum(min(work, own + num_tokens) for work in others)) / self.tokens_per_s


@dataclass(slots=True)
class BeginRate:
    """Tokens of work that begin per second, measured while some work is always waiting."""

    tokens_per_s: float | None = None
    _since_ns: int | None = None
    _work: float = 0.0
    _num: int = 0

    def begun(self, work: float) -> None:
        self._work += work
        self._num += 1

    def look(self, now_ns: int, *, waits: bool) -> None:
        """Measure, once per step. `waits`: whether any work is still waiting."""
        if not waits or self._since_ns is None:
            self._since_ns, self._work, self._num = (now_ns if waits else None), 0.0, 0
            return
        seconds = (now_ns - self._since_ns) / 1e9
        if seconds < MIN_WINDOW_S or (self._num < MIN_BEGUN and seconds < MAX_WINDOW_S):
            return
        rate = self._work / seconds
        before = rate if self.tokens_per_s is None else self.tokens_per_s
        self.tokens_per_s = max(1.0, before + SMOOTHING * (rate - before))
        self._since_ns, self._work, self._num = now_ns, 0.0, 0
