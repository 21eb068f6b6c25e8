"""Whether the roles of a prompt's parts would make `adaptive` hit more.

    python -m tests.bench.roles [--seeds 1 2] [--json FILE]

A policy that knows the role of each block (system, tools, user, assistant, reasoning, tool result)
and what the client does next (a tool, by name, or the user) could keep what comes back soon and
give up what never does. Here `adaptive` learns from both as two more features, and its runs of
blocks end where a role ends. It is an experiment: no setting turns it on.

No public trace has roles or names of tools, so these are made. Each is an hour of sessions of
several applications, in blocks of 64 tokens, and names the blocks of prompts and of answers:

- An application has a system prompt and tools that all its sessions share. It calls some tools
  more than others.
- A step of a session appends a user's message or a tool's result. The answer is reasoning and a
  call, or reasoning and a text for the user.
- Half of the applications drop the reasoning of a turn when the next user's message comes, as many
  chat templates do. From the first dropped block on, that prompt has new blocks.
- After a call the client pauses as long as the tool takes (log-normal, by tool). After a text the
  user returns with a probability and a pause of the application, or never.
- Single prompts with a long document come in between and never return.

The policies see both halves of the hour. Only hits of the second half count: what was learned in
the first is tried on requests that nobody has seen.

Estimate: reasoning is a fifth of the blocks, and half of it never returns, which `adaptive` can
partly learn from the place of a run in its chain. Pauses of tools differ by a factor of 500, which
it sees only as the pause before the last one. So 1 to 3 points at small capacities, and nothing
where the working set fits.
"""

import argparse
import heapq
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from tests.bench.provenance import commit, machine
from tiers.policy.adaptive import _NUM_FEATURES, Adaptive
from tiers.policy.policy import Policy, Use
from tiers.policy.prefix_node import PrefixRun
from tiers.policy.registry import make_policy
from tiers.policy.reuse_model import ReuseModel, Rows
from tiers.replay.belady import Belady, future_uses
from tiers.replay.replay import MIN, Hierarchy, TierPlan
from tiers.replay.trace import Trace, TraceRequest

BLOCK = 64
HOUR_S = 3600.0
SHARES = (0.02, 0.05, 0.10, 0.25)
ROLES = ("system", "tools", "user", "assistant", "reasoning", "result")
# Seconds that a tool takes (median and spread of a log-normal), and blocks of its result (mean).
TOOLS = {
    "read_file": (0.3, 0.5, 6),
    "edit_file": (0.5, 0.5, 1),
    "search": (1.5, 0.7, 4),
    "web_fetch": (4.0, 0.8, 20),
    "run_command": (8.0, 1.2, 3),
    "run_tests": (70.0, 0.8, 5),
    "sub_agent": (150.0, 0.8, 4),
}
USER, NOBODY = "user", "nobody"  # who is next after a text: not known to a policy before
NEXT = (USER, *TOOLS)


class RoledBlock(int):
    """A block's id that knows its role and, as the last of a request, who is next."""

    role: int
    ends: int


@dataclass(frozen=True, slots=True)
class Application:
    """Where its sessions begin, what they do, and how long their users pause."""

    system: tuple[RoledBlock, ...]
    weights: tuple[float, ...]  # of its tools; empty: it has none
    steps: float  # mean calls of a turn
    drops: bool  # the reasoning of earlier turns
    returns: float  # probability of another turn
    pause_s: float  # median, before another turn


@dataclass(frozen=True, slots=True)
class Load:
    """The sessions of one made trace."""

    name: str
    num_applications: int
    tool_share: float  # of applications with tools
    sessions_per_s: float
    singles_per_s: float
    steps: float


LOADS = (
    Load("coding agents", 6, 1.0, 0.08, 0.1, 14.0),
    Load("assistants", 20, 0.6, 0.4, 0.3, 2.5),
)


class Maker:
    """Makes one trace from a seed."""

    def __init__(self, load: Load, seed: int) -> None:
        self._load = load
        self._rng = random.Random(f"{load.name}:{seed}")
        self._ids = count()

    def trace(self) -> Trace:
        load, rng = self._load, self._rng
        applications = [self._application() for _ in range(load.num_applications)]
        ranks = [1 / (rank + 1) for rank in range(len(applications))]
        sources: list[Iterator[tuple[float, TraceRequest]]] = []
        for time_s in self._arrivals(load.sessions_per_s):
            sources.append(self._session(time_s, rng.choices(applications, ranks)[0]))
        sources += [self._single(time_s) for time_s in self._arrivals(load.singles_per_s)]
        # Sources draw from one generator in the order of time, so a seed always gives one trace.
        queue = [(first[0], number, first[1]) for number, source in enumerate(sources)
                 if (first := next(source, None))]  # fmt: skip
        heapq.heapify(queue)
        requests = []
        while queue:
            time_s, number, request = heapq.heappop(queue)
            requests.append(request)
            if (later := next(sources[number], None)) and later[0] < HOUR_S:
                heapq.heappush(queue, (later[0], number, later[1]))
        return Trace(load.name, requests, BLOCK)

    def _application(self) -> Application:
        rng = self._rng
        has_tools = rng.random() < self._load.tool_share
        system = self._fresh("system", rng.uniform(2, 40))
        tools = self._fresh("tools", rng.uniform(8, 100)) if has_tools else []
        weights = tuple(rng.expovariate(1) for _ in TOOLS) if has_tools else ()
        return Application(
            (*system, *tools),
            weights,
            self._load.steps * rng.uniform(0.5, 1.5),
            rng.random() < 0.5,
            rng.uniform(0.2, 0.8),
            rng.uniform(30, 400),
        )

    def _session(self, time_s: float, app: Application) -> Iterator[tuple[float, TraceRequest]]:
        rng = self._rng
        kept: list[RoledBlock] = [*app.system]  # what the next turn begins with
        while True:
            turn = self._fresh("user", 1 + rng.expovariate(1 / 6))
            while True:
                calls = bool(app.weights) and rng.random() < 1 - 1 / app.steps
                tool = rng.choices(tuple(TOOLS), app.weights)[0] if calls else USER
                thought = self._fresh("reasoning", 1 + rng.expovariate(1 / 3))
                said = self._fresh("assistant", 1 if calls else 1 + rng.expovariate(1 / 4))
                yield time_s, _request(time_s, [*kept, *turn], [*thought, *said], tool)
                turn += [*thought, *said]
                time_s += 0.02 * BLOCK * (len(thought) + len(said))  # to generate it
                if not calls:
                    break
                median_s, spread, size = TOOLS[tool]
                time_s += median_s * rng.lognormvariate(0, spread)
                turn += self._fresh("result", 1 + rng.expovariate(1 / size))
            if rng.random() >= app.returns:
                return
            time_s += app.pause_s * rng.lognormvariate(0, 1.0)
            kept += self._without_reasoning(turn) if app.drops else turn

    def _without_reasoning(self, turn: Sequence[RoledBlock]) -> list[RoledBlock]:
        """A turn as its template renders it later: what follows a dropped block is another one."""
        reasoning = ROLES.index("reasoning")
        first = next(n for n, block in enumerate(turn) if block.role == reasoning)
        later = [block for block in turn[first:] if block.role != reasoning]
        return [*turn[:first], *(self._block(block.role) for block in later)]

    def _single(self, time_s: float) -> Iterator[tuple[float, TraceRequest]]:
        rng = self._rng
        document = self._fresh("user", 20 + rng.expovariate(1 / 100))
        yield time_s, _request(time_s, document, self._fresh("assistant", 2), USER)

    def _arrivals(self, rate: float) -> Iterator[float]:
        time_s = self._rng.expovariate(rate)
        while time_s < HOUR_S:
            yield time_s
            time_s += self._rng.expovariate(rate)

    def _fresh(self, role: str, size: float) -> list[RoledBlock]:
        return [self._block(ROLES.index(role)) for _ in range(max(1, int(size)))]

    def _block(self, role: int) -> RoledBlock:
        block = RoledBlock(next(self._ids))
        block.role, block.ends = role, 0
        return block


def _request(
    time_s: float, prompt: Sequence[RoledBlock], answer: Sequence[RoledBlock], ends: str
) -> TraceRequest:
    """A request whose chain has its answer too; only tokens of the prompt can hit."""
    answer[-1].ends = NEXT.index(ends)
    return TraceRequest(time_s, BLOCK * len(prompt), (*prompt, *answer), BLOCK * len(answer))


class RoledAdaptive(Adaptive[RoledBlock]):
    """`adaptive` with two more features: the role of a run, and who is next after its request."""

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        self._model = ReuseModel(_NUM_FEATURES + 2)
        self._ends = 0

    def _walk(
        self, chain: Any, keys: Sequence[RoledBlock]
    ) -> tuple[list[PrefixRun[RoledBlock]], int]:
        self._ends = keys[-1].ends
        return super()._walk(chain, keys)

    def _count_new(self, keys: Sequence[RoledBlock], start: int) -> int:
        size, role = super()._count_new(keys, start), keys[start].role
        return next((n for n in range(1, size) if keys[start + n].role != role), size)

    def _features(
        self,
        node: PrefixRun[RoledBlock],
        wait_s: float,
        pause_s: float,
        num_known: int,
        use: Use,
    ) -> Rows:
        known = super()._features(node, wait_s, pause_s, num_known, use)
        return (*known, node.head.role, self._ends)


def policy(name: str, capacity: int, trace: Trace) -> Policy[Any]:
    if name == MIN:
        return Belady(future_uses(request.blocks for request in trace.requests))
    return RoledAdaptive(capacity) if name == "adaptive+roles" else make_policy(name, capacity)


def held_out(trace: Trace, name: str, capacity: int) -> float:
    """The share of the prompt tokens of the second half that hit."""
    hierarchy = Hierarchy([TierPlan("cache", capacity)], policies=[policy(name, capacity, trace)])
    before = tokens = 0
    for request in trace.requests:
        if request.time_s < HOUR_S / 2:
            hierarchy.serve(request, BLOCK)
            before = hierarchy.tiers()[0].hit_tokens
        else:
            hierarchy.serve(request, BLOCK)
            tokens += request.input_tokens
    return (hierarchy.tiers()[0].hit_tokens - before) / tokens


def compared(load: Load, seed: int) -> dict[str, Any]:
    trace = Maker(load, seed).trace()
    num_blocks = trace.working_set_blocks()
    rates = {}
    for name in ("lru", "adaptive", "adaptive+roles", MIN):
        sizes = [int(share * num_blocks) for share in SHARES]
        rates[name] = [round(held_out(trace, name, size), 4) for size in sizes]
        print(f"{load.name} {seed} {name}", *rates[name], flush=True)
    return {
        "load": load.name,
        "seed": seed,
        "num_requests": len(trace.requests),
        "num_accesses": trace.num_accesses,
        "num_blocks": num_blocks,
        "hit_rates": rates,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--loads", nargs="+", default=[load.name for load in LOADS])
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    runs = []
    for load in (each for each in LOADS if each.name in options.loads):
        for seed in options.seeds:
            runs.append(compared(load, seed))
            print(json.dumps(runs[-1]), flush=True)
    if options.json:
        report = {"commit": commit(), "machine": machine(), "shares": SHARES, "runs": runs}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
