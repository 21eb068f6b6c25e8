"""What pinning sessions while they pause does to hits, against LRU alone.

    python tests/bench/sessions.py --agents TRACE [--others TRACE] [--json FILE]

One memory tier of some capacity above a larger one. `sessions` is LRU with the server's own rule: a
session's blocks are held until its tenant's usual pause (learned as the server learns it) is over,
leave after all others until then, and go together. `--agents` is a trace whose lines name their
session, `--others` one that is mixed in at an eighth of its load, again and again, with no session.
A made load goes beside them: agents with tool calls, and a scan.

Estimate: LRU evicts whole sessions, oldest first, already; pins can only help where something else
pushes between two turns. So nothing alone, some points in a mix, most where the memory holds the
sessions that run and no more.
"""

import argparse
import json
import random
import sys
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import replace
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from api.requests.retention import Pauses
from tests.bench.provenance import commit, machine
from tests.support.plain_lru import Lru
from tiers.policy.policy import Use
from tiers.policy.retention import Pin, PinKind, Pins
from tiers.replay.trace import Trace, TraceRequest, read_trace

SHARES = (0.02, 0.05, 0.10)  # of the distinct blocks of a load
MIXED = 8  # one in so many requests of --others
HOUR_S = 3600


class Memory:
    """One LRU tier, whose held blocks leave after all others. `pins`: with sessions."""

    def __init__(self, capacity: int, *, pins: bool) -> None:
        self.capacity = capacity
        self.order = Lru[Hashable]()
        self.resident: set[Hashable] = set()
        self.pins: Pins[Any] | None = Pins(1 << 40) if pins else None
        self.held: OrderedDict[Hashable, None] = OrderedDict()
        self.over: list[tuple[float, str]] = []
        self.pauses = Pauses()

    def serve(self, request: TraceRequest, block_tokens: int) -> int:
        """Tokens that hit."""
        self._expire(request.time_s)
        hit, left = 0, request.input_tokens
        for key in request.blocks:
            if key not in self.resident:
                break
            hit += min(block_tokens, left)
            left -= min(block_tokens, left)
        use = Use(request.time_s, request.tenant)
        for key in reversed(request.blocks):
            if key in self.held:
                self.held.move_to_end(key)
            elif key in self.resident:
                self.order.touch(key, use)
            else:
                self.resident.add(key)
                self.order.insert(key, use)
        if self.pins is not None and request.session is not None:
            self._keep(request, use)
        while len(self.resident) > self.capacity:
            self._evict()
        return hit

    def _keep(self, request: TraceRequest, use: Use) -> None:
        assert self.pins is not None and request.session is not None
        ended = self.pauses.ended.get(request.session)
        if ended is not None:
            self.pauses.add(request.time_s - ended)
        self.pauses.ended[request.session] = request.time_s
        until_s = request.time_s + self.pauses.usual_s()
        pin = Pin(name=request.session, keys=request.blocks, until_s=until_s, kind=PinKind.SESSION)
        _, released = self.pins.put(pin)
        heappush(self.over, (until_s, request.session))
        self._release(released, use)
        for key in reversed(request.blocks):
            if key not in self.held:
                self.order.hold(key)
            self.held[key] = None
            self.held.move_to_end(key)

    def _expire(self, now_s: float) -> None:
        while self.pins is not None and self.over and self.over[0][0] <= now_s:
            until_s, session = heappop(self.over)
            pin = self.pins.get(session)
            if pin is not None and pin.until_s == until_s:
                use = Use(now_s)
                self._release(self.pins.unpin(session), use)

    def _release(self, keys: list[Any], use: Use) -> None:
        for key in keys:
            if key in self.held:
                del self.held[key]
                self.order.release(key, use)

    def _evict(self) -> None:
        key = self.order.victim()
        if key is None:
            key, _ = self.held.popitem(last=False)
            self.order.remove(key)
        self.resident.discard(key)


def mixed(agents: Trace, others: Trace) -> Trace:
    """The agents' hours, and the others' again and again beside them."""
    requests = list(agents.requests)
    last_s = max(request.time_s for request in requests)
    hour = 0
    while hour * HOUR_S < last_s:
        requests += [
            replace(
                request,
                time_s=request.time_s + hour * HOUR_S,
                blocks=tuple((hour, key) for key in request.blocks),
                session=None,
            )
            for request in others.requests[::MIXED]
        ]
        hour += 1
    requests.sort(key=lambda request: request.time_s)
    return Trace(f"{agents.name} + {others.name} / {MIXED}", requests, agents.block_tokens)


def made(seed: int = 1) -> Trace:
    """Forty agents of thirty turns that pause for tools, and two unique prompts a second."""
    dice = random.Random(seed)
    requests = []
    for agent in range(40):
        now_s, blocks = dice.random() * 1200, 20
        for _ in range(30):
            keys = tuple(("agent", agent, number) for number in range(blocks))
            requests.append(TraceRequest(now_s, blocks * 512, keys, session=f"a{agent}"))
            slow = dice.random() < 0.15
            now_s += dice.expovariate(1 / 90.0) + 60 if slow else dice.expovariate(1 / 12.0) + 1
            blocks += dice.randint(1, 4)
    for number in range(2 * 2400):
        keys = tuple(("scan", number, place) for place in range(10))
        requests.append(TraceRequest(number / 2, 5120, keys))
    requests.sort(key=lambda request: request.time_s)
    return Trace("made agents and a scan", requests)


def compare(trace: Trace) -> dict[str, Any]:
    """Hit rates at `SHARES`: of the sessions' tokens, and of all."""
    working_set = trace.working_set_blocks()
    capacities = [max(1, round(share * working_set)) for share in SHARES]
    found: dict[str, Any] = {"blocks": working_set, "capacities": capacities}
    print(f"{trace.name}: {len(trace.requests)} requests, {working_set} blocks")
    for name, pins in (("lru", False), ("sessions", True)):
        rows = [_rates(trace, Memory(capacity, pins=pins)) for capacity in capacities]
        found[name] = rows
        print(f"  {name:20}", *(f"{of:.3f} ({whole:.3f})" for of, whole in rows), flush=True)
    return found


def _rates(trace: Trace, memory: Memory) -> tuple[float, float]:
    hit = dict.fromkeys((True, False), 0)
    tokens = dict.fromkeys((True, False), 0)
    for request in trace.requests:
        kind = request.session is not None
        hit[kind] += memory.serve(request, trace.block_tokens)
        tokens[kind] += request.input_tokens
    whole = sum(hit.values()) / sum(tokens.values())
    return round(hit[True] / tokens[True], 4), round(whole, 4)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--agents", type=Path)
    parser.add_argument("--others", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    traces = [made()]
    if options.agents is not None:
        agents = read_trace(options.agents)
        traces.append(agents)
        if options.others is not None:
            traces.append(mixed(agents, read_trace(options.others)))
    found = {trace.name: compare(trace) for trace in traces}
    if options.json:
        told = {"commit": commit(), "machine": machine(), "shares": SHARES, "loads": found}
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
