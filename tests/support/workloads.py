"""Synthetic request traces from a seed. Policies are tested and compared on them without a file.

A trace merges several sources. Each source has its own rhythm: it gives the time and the chain of
blocks of its next request. Block ids are fresh integers. A conversation keeps its list of them.
"""

import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, islice

from tiers.replay.trace import MOONCAKE_BLOCK_TOKENS, Trace, TraceRequest

_Event = tuple[float, list[int], str]  # seconds from the start, chain, tenant
_Source = Iterator[_Event]


@dataclass(frozen=True, slots=True)
class ChatLoad:
    """Conversations that begin at a steady rate, continue with a probability, and pause between
    turns."""

    conversations_per_s: float = 1.0
    go_on: float = 0.6  # probability of one more turn
    think_s: float = 60.0  # mean time between turns, log-normal
    prompt_blocks: float = 12.0  # mean of a first prompt, exponential
    turn_blocks: float = 3.0  # mean that each later turn adds
    num_system_prompts: int = 20  # shared; chosen by a power law
    system_blocks: int = 4
    tenant: str = "chat"


@dataclass(frozen=True, slots=True)
class Agents:
    """Tool loops: many quick steps on one growing context, then nothing more."""

    loops_per_s: float = 0.05
    steps: float = 20.0  # mean steps of a loop, geometric
    step_s: float = 8.0  # mean time between steps, exponential
    first_blocks: int = 16
    step_blocks: float = 2.0
    system_blocks: int = 8
    tenant: str = "agents"


@dataclass(frozen=True, slots=True)
class Scan:
    """Prompts that never repeat: a batch job over documents."""

    prompts_per_s: float = 1.0
    blocks: int = 20
    start_s: float = 0.0
    end_s: float = float("inf")
    tenant: str = "scan"


@dataclass(frozen=True, slots=True)
class Documents:
    """Questions about a few documents, chosen by a power law. The popular ones change with time."""

    questions_per_s: float = 1.0
    num_documents: int = 400
    blocks: int = 24
    skew: float = 1.0
    shift_s: float = float("inf")  # time after which other documents become popular
    tenant: str = "documents"


Workload = ChatLoad | Agents | Scan | Documents


def make_trace(name: str, workloads: Sequence[Workload], *, duration_s: float, seed: int) -> Trace:
    """Merge workloads into one trace of `duration_s`, with requests in order of time."""
    ids = count()
    rngs = [random.Random(f"{seed}:{number}") for number in range(len(workloads))]
    sources = [
        _start(workload, rng, ids, duration_s)
        for workload, rng in zip(workloads, rngs, strict=True)
    ]
    requests = []
    for time_s, chain, tenant in heapq.merge(*sources, key=lambda event: event[0]):
        last = 1 + chain[-1] * 7919 % MOONCAKE_BLOCK_TOKENS  # the last block is partly filled
        tokens = (len(chain) - 1) * MOONCAKE_BLOCK_TOKENS + last
        requests.append(TraceRequest(time_s, tokens, tuple(chain), 300, tenant))
    return Trace(name, requests)


def _start(
    workload: Workload, rng: random.Random, ids: Iterator[int], duration_s: float
) -> _Source:
    match workload:
        case ChatLoad():
            return _chat(workload, rng, ids, duration_s)
        case Agents():
            return _agents(workload, rng, ids, duration_s)
        case Scan():
            return _scan(workload, rng, ids, duration_s)
        case Documents():
            return _documents(workload, rng, ids, duration_s)


def _chat(chat: ChatLoad, rng: random.Random, ids: Iterator[int], duration_s: float) -> _Source:
    prompts = [_fresh(ids, chat.system_blocks) for _ in range(chat.num_system_prompts)]
    ranks = _power_law(chat.num_system_prompts, 1.0)

    def first() -> list[int]:
        system = rng.choices(prompts, cum_weights=ranks)[0] if prompts else []
        return system + _fresh(ids, 1 + rng.expovariate(1 / chat.prompt_blocks))

    def later(chain: list[int]) -> tuple[float, list[int]] | None:
        if rng.random() >= chat.go_on:
            return None
        pause_s = chat.think_s * rng.lognormvariate(-0.5, 1.0)
        return pause_s, chain[:-1] + _fresh(ids, 1 + rng.expovariate(1 / chat.turn_blocks))

    arrivals = _arrivals(rng, chat.conversations_per_s, 0.0, duration_s)
    return _sessions(arrivals, first, later, chat.tenant, duration_s)


def _agents(agents: Agents, rng: random.Random, ids: Iterator[int], duration_s: float) -> _Source:
    system = _fresh(ids, agents.system_blocks)

    def first() -> list[int]:
        return system + _fresh(ids, agents.first_blocks)

    def later(chain: list[int]) -> tuple[float, list[int]] | None:
        if rng.random() < 1 / agents.steps:
            return None
        grown = chain[:-1] + _fresh(ids, 1 + rng.expovariate(1 / agents.step_blocks))
        return rng.expovariate(1 / agents.step_s), grown

    arrivals = _arrivals(rng, agents.loops_per_s, 0.0, duration_s)
    return _sessions(arrivals, first, later, agents.tenant, duration_s)


def _scan(scan: Scan, rng: random.Random, ids: Iterator[int], duration_s: float) -> _Source:
    for time_s in _arrivals(rng, scan.prompts_per_s, scan.start_s, min(scan.end_s, duration_s)):
        yield time_s, _fresh(ids, scan.blocks), scan.tenant


def _documents(
    documents: Documents, rng: random.Random, ids: Iterator[int], duration_s: float
) -> _Source:
    shelf = [_fresh(ids, documents.blocks) for _ in range(documents.num_documents)]
    ranks = _power_law(documents.num_documents, documents.skew)
    shift_s = documents.shift_s
    for time_s in _arrivals(rng, documents.questions_per_s, 0.0, duration_s):
        if time_s >= shift_s:
            rng.shuffle(shelf)
            shift_s += documents.shift_s
        yield time_s, rng.choices(shelf, cum_weights=ranks)[0] + _fresh(ids, 1), documents.tenant


def _sessions(
    arrivals: Iterator[float],
    first: Callable[[], list[int]],
    later: Callable[[list[int]], tuple[float, list[int]] | None],
    tenant: str,
    duration_s: float,
) -> _Source:
    """Sessions that continue until `later` returns None instead of (pause, next chain)."""
    ahead: list[tuple[float, int, list[int]]] = []
    serial = count()
    arrival = next(arrivals, math.inf)
    while ahead or arrival < math.inf:
        if not ahead or arrival < ahead[0][0]:
            time_s, chain = arrival, first()
            arrival = next(arrivals, math.inf)
        else:
            time_s, _, chain = heapq.heappop(ahead)
        yield time_s, chain, tenant
        step = later(chain)
        if step is not None and time_s + step[0] < duration_s:
            heapq.heappush(ahead, (time_s + step[0], next(serial), step[1]))


def _arrivals(rng: random.Random, rate: float, start_s: float, end_s: float) -> Iterator[float]:
    """Arrival times of a Poisson process."""
    time_s = start_s + rng.expovariate(rate)
    while time_s < end_s:
        yield time_s
        time_s += rng.expovariate(rate)


def _fresh(ids: Iterator[int], num_blocks: float) -> list[int]:
    return list(islice(ids, max(0, int(num_blocks))))


def _power_law(number: int, skew: float) -> list[float]:
    """Cumulative weights of ranks 1 to `number`."""
    return list(accumulate(1 / rank**skew for rank in range(1, number + 1)))
