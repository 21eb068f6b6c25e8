"""Counts how much each share was served, to divide the engine's time between active shares.

A share is an opaque name, such as a tenant's. An owner may divide its share: `owner\0part` is one
part, such as an end user's, and the owner's active parts have equal weights that sum to one share.
Service is counted in tokens of work by weight, and the least served share goes first (start-time
fair queueing: Goyal, Vin and Cheng 1996). A returning share is
not compensated for its absence, except for a first prompt. A share that asks for less than its part
is therefore served at once, like the sparse flows of FQ-CoDel (RFC 8290). Pure. Engine thread only.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from heapq import heapify, heappop, heapreplace
from types import MappingProxyType
from typing import NamedTuple, TypeVar

CREDIT = 2048.0  # tokens of work that a share may be behind when it becomes active: some prompts
MIN_WINDOW_S = 0.5  # the shortest measurement
MAX_WINDOW_S = 10.0
MIN_BEGUN = 4  # requests in one measurement, so that one long request is not the rate
SMOOTHING = 0.4
LEAST_RATE = 0.001  # of the greatest; a share with less has left
_BETWEEN = "\0"  # in no tenant's name
Item = TypeVar("Item")


def part_of(owner: str, part: str) -> str:
    """The name of a part of an owner's share."""
    return f"{owner}{_BETWEEN}{part}"


def owner_of(share: str) -> str:
    """Whose share it is, whole or a part."""
    return share.partition(_BETWEEN)[0]


class ServedShares:
    """Work by share.

    Invariant: an active share's count is at least that of the least served share at the moment it
    became active, minus `CREDIT`. Credit returns only as fast as the others are served, so leaving
    and returning gains nothing.
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._active: Counter[str] = Counter()
        self._parts: Counter[str] = Counter()  # active shares by owner
        self._floor = 0.0
        self._first: str | None = None
        self.several = False  # whether shares of more than one owner have been seen

    def __getitem__(self, share: str) -> float:
        """What the share has been served, from an arbitrary origin."""
        return self._served.get(share, self._floor - CREDIT)

    def enter(self, share: str) -> None:
        """Count one more waiting or running sequence of the share."""
        owner = owner_of(share)
        if self._first is None:
            self._first = owner
        self.several = self.several or owner != self._first
        if not self._active[share]:
            self._raise_floor()
            self._parts[owner] += 1
            self._served[share] = max(self[share], self._floor - CREDIT)
        self._active[share] += 1

    def leave(self, share: str) -> None:
        """Count one sequence less."""
        self._raise_floor()
        self._active[share] -= 1
        if not self._active[share]:
            del self._active[share]
            owner = owner_of(share)
            self._parts[owner] -= 1
            if not self._parts[owner]:
                del self._parts[owner]
            self._forget()

    def charge(self, share: str, work: float) -> None:
        self._served[share] = self[share] + work * self._num_parts(share)

    def _num_parts(self, share: str) -> int:
        """How many active parts divide its owner's share; a part has the inverse as its weight."""
        return max(1, self._parts[owner_of(share)])

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
        # The first among equals is the oldest line.
        turns = [(self[share], number, share) for number, share in enumerate(lines)]
        heapify(turns)
        left = {share: iter(zip(lines[share], works[share], strict=True)) for share in lines}
        while turns:
            served, number, share = turns[0]
            item, work = next(left[share], (None, 0.0))
            if item is None:
                heappop(turns)
                continue
            heapreplace(turns, (served + work * self._num_parts(share), number, share))
            yield item


class Backlog(NamedTuple):
    """The waiting work by share, and how fast such work begins. A snapshot for any thread."""

    waiting: Mapping[str, float] = MappingProxyType({})  # tokens to compute
    tokens_per_s: float | None = None  # None: not measured yet
    rates: Mapping[str, float] = MappingProxyType({})  # of that, by share

    def wait_s(self, share: str, num_tokens: float) -> float:
        """How long a request of `share` with `num_tokens` to compute would wait to begin.

        All waiting work of its own share comes first. So does that of each other share, but at most
        as much as its own share is served in that time, by their weights. And others ask meanwhile:
        if they go on as they did, its own share gets what they leave, or its part if that is more.
        """
        if not self.waiting or not self.tokens_per_s:
            return 0.0
        own = self.waiting.get(share, 0.0)
        active = {*self.waiting, *self.rates, share}
        parts = Counter(map(owner_of, active))
        most = (own + num_tokens) * parts[owner_of(share)]
        others = (
            min(work, most / parts[owner_of(name)])
            for name, work in self.waiting.items()
            if name != share
        )
        taken = sum(rate for name, rate in self.rates.items() if name != share)
        part = self.tokens_per_s / len(parts) / parts[owner_of(share)]
        return max(
            own / max(part, self.tokens_per_s - taken), (own + sum(others)) / self.tokens_per_s
        )


class BeginRate:
    """Tokens of work that begin per second, measured while some work is always waiting."""

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}
        self._known = False
        self._since_ns: int | None = None
        self._work: Counter[str] = Counter()
        self._num = 0

    def begun(self, share: str, work: float) -> None:
        self._work[share] += work  # type: ignore[assignment]
        self._num += 1

    def look(self, now_ns: int, waiting: Mapping[str, float]) -> Backlog:
        """Measure, once per step."""
        if not waiting or self._since_ns is None:
            self._begin(now_ns if waiting else None)
        else:
            seconds = (now_ns - self._since_ns) / 1e9
            enough = self._num >= MIN_BEGUN or seconds >= MAX_WINDOW_S
            if seconds >= MIN_WINDOW_S and enough:
                self._measure(seconds)
                self._begin(now_ns)
        return self.backlog(waiting)

    def backlog(self, waiting: Mapping[str, float]) -> Backlog:
        """This work at the rates measured last. Any thread."""
        rates = self._rates
        return Backlog(waiting, max(1.0, sum(rates.values())) if self._known else None, rates)

    def _begin(self, now_ns: int | None) -> None:
        self._since_ns, self._work, self._num = now_ns, Counter(), 0

    def _measure(self, seconds: float) -> None:
        smoothing = SMOOTHING if self._known else 1.0
        rates = {
            share: before + smoothing * (self._work[share] / seconds - before)
            for share in {*self._rates, *self._work}
            for before in (self._rates.get(share, 0.0),)
        }
        most = max(rates.values(), default=0.0)
        self._rates = {share: rate for share, rate in rates.items() if rate > LEAST_RATE * most}
        self._known = True
