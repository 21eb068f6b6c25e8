"""Replays a trace over many servers, with a router before them and a shared store below.

Each server has its own tiers. One store may stand below all of them, like the remote tier of real
servers. It takes blocks that were hit again (`reused`) or all blocks (`all`). The router either
knows what each server holds, as KV events tell real routers, or sends requests anywhere. One
thread.
"""

import random
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile

from tiers.replay.replay import Hierarchy, Progress, TierPlan
from tiers.replay.trace import Trace, TraceRequest

LOAD_BOUND = 1.25  # of the mean load: the most that a router accepts for a prefix
HALF_LIFE_S = 60.0  # of the router's memory of a server's work


class Routing(StrEnum):
    """How a router picks a server."""

    RANDOM = "random"
    PREFIX = "prefix"  # the server with the longest prefix, unless it has too much to do


@dataclass(frozen=True, slots=True)
class FleetReplay:
    """The result of a trace on a fleet, in tokens. `shared_*` count blocks to and from the store
    below."""

    routing: Routing
    num_servers: int
    shared_blocks: int  # the store's capacity; 0 if there is none
    tokens: int
    local_hit_tokens: int
    shared_hit_tokens: int
    shared_read: int
    shared_written: int
    shared_lookups: int  # requests that asked the store for blocks their server lacked
    seconds: float  # between the first and the last request
    imbalance: float  # the most tokens computed by one server, over the mean

    @property
    def hit_rate(self) -> float:
        hits = self.local_hit_tokens + self.shared_hit_tokens
        return hits / self.tokens if self.tokens else 0.0

    @property
    def computed_tokens(self) -> int:
        return self.tokens - self.local_hit_tokens - self.shared_hit_tokens


class Shared:
    """The store below all servers, in LRU order."""

    def __init__(self, capacity_blocks: int, *, takes_all: bool) -> None:
        self._capacity = capacity_blocks
        self._takes_all = takes_all
        self._held: OrderedDict[Hashable, None] = OrderedDict()
        self.num_read = self.num_written = self.num_lookups = 0

    def read(self, blocks: Sequence[Hashable]) -> int:
        """Read the leading blocks. Returns how many of them it serves."""
        self.num_lookups += bool(blocks)
        served = list(takewhile(self._held.__contains__, blocks))
        for key in served:
            self._held.move_to_end(key)
        self.num_read += len(served)
        return len(served)

    def offer(self, blocks: Sequence[Hashable], num_hit: int) -> None:
        """Offer the blocks that a server has now. It had the first `num_hit` of them before."""
        for key in blocks if self._takes_all else blocks[:num_hit]:
            if key in self._held:
                continue
            self._held[key] = None
            self.num_written += 1
            if len(self._held) > self._capacity:
                self._held.popitem(last=False)


class Fleet:
    """Servers, a router before them and a store below. Call `serve` in the order of arrival."""

    def __init__(
        self,
        plans: Sequence[TierPlan],
        num_servers: int,
        routing: Routing,
        *,
        shared_blocks: int = 0,
        takes_all: bool = False,
        seed: int = 0,
    ) -> None:
        self._servers = [Hierarchy(plans) for _ in range(num_servers)]
        self.shared = Shared(shared_blocks, takes_all=takes_all) if shared_blocks else None
        self._routing = routing
        self._dice = random.Random(seed)
        self._load = [0.0] * num_servers  # tokens computed recently
        self._now_s = 0.0
        self.tokens: Counter[str] = Counter()
        self.computed = [0] * num_servers

    def serve(self, request: TraceRequest, block_tokens: int) -> None:
        number = self._pick(request)
        server, blocks = self._servers[number], request.blocks
        local = server.held(blocks)
        below = self.shared.read(blocks[local:]) if self.shared is not None else 0
        tokens = _tokens(request, block_tokens, local)
        all_hit = _tokens(request, block_tokens, local + below)
        server.serve(request, block_tokens)
        if self.shared is not None:
            self.shared.offer(blocks, local)
        self.tokens.update(local=tokens, shared=all_hit - tokens)
        computed = request.input_tokens - all_hit
        self.computed[number] += computed
        self._load[number] += computed

    def _pick(self, request: TraceRequest) -> int:
        if self._routing is Routing.RANDOM:
            return self._dice.randrange(len(self._servers))
        self._forget_work(request.time_s)
        most = LOAD_BOUND * sum(self._load) / len(self._load)
        open_ = [number for number, load in enumerate(self._load) if load <= most]
        held = {number: self._servers[number].held(request.blocks) for number in open_}
        return max(open_, key=lambda number: (held[number], -self._load[number]))

    def _forget_work(self, now_s: float) -> None:
        kept = 0.5 ** (max(0.0, now_s - self._now_s) / HALF_LIFE_S)
        self._now_s = max(now_s, self._now_s)
        self._load = [load * kept for load in self._load]


def replay_fleet(
    trace: Trace,
    plans: Sequence[TierPlan],
    num_servers: int,
    routing: Routing,
    *,
    shared_blocks: int = 0,
    takes_all: bool = False,
    seed: int = 0,
    progress: Progress = lambda num_requests: None,
) -> FleetReplay:
    """Replay a whole trace over `num_servers` servers, each with tiers as planned."""
    fleet = Fleet(
        plans, num_servers, routing, shared_blocks=shared_blocks, takes_all=takes_all, seed=seed
    )
    for request in trace.requests:
        fleet.serve(request, trace.block_tokens)
        progress(1)
    times = [request.time_s for request in trace.requests]
    shared = fleet.shared
    mean = sum(fleet.computed) / num_servers
    return FleetReplay(
        routing=routing,
        num_servers=num_servers,
        shared_blocks=shared_blocks,
        tokens=trace.input_tokens,
        local_hit_tokens=fleet.tokens["local"],
        shared_hit_tokens=fleet.tokens["shared"],
        shared_read=shared.num_read if shared is not None else 0,
        shared_written=shared.num_written if shared is not None else 0,
        shared_lookups=shared.num_lookups if shared is not None else 0,
        seconds=max(times) - min(times),
        imbalance=max(fleet.computed) / mean if mean else 1.0,
    )


def _tokens(request: TraceRequest, block_tokens: int, num_blocks: int) -> int:
    """The number of tokens in the request's leading blocks. The last one may be partial."""
    return min(num_blocks * block_tokens, request.input_tokens)
