"""Runs a trace through the real scheduler and cache, in simulated time and without a model.

It shows what an order of the queue serves from the cache and how long requests wait.
`engine.scheduling.queue`, `engine.scheduling.scheduler` and `tiers` are the real ones; only the
runner and the clock are simulated. One simulated token stands for several of the trace, so an hour
of it takes a minute. One thread.
"""

from array import array
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from engine.batch import Batch, Sampled
from engine.engine import Engine
from engine.request import Request, SamplingParams, StepOutput
from engine.scheduling.settings import SchedulerSettings
from engine.settings import EngineSettings
from tests.support.chain_runner import StatelessRunner
from tiers.blocks.keys import CacheScope
from tiers.blocks.layout import BlockLayout
from tiers.cache import CacheSettings, TieredCache
from tiers.replay.trace import Trace, TraceRequest

BLOCK = 16  # simulated tokens per block, which is one block of the trace


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedServer:
    """Sizes are in blocks of the trace, rates in its tokens. There is only a device tier."""

    capacity_blocks: int
    prefill_tokens_per_s: float
    step_s: float = 0.02  # a step's time without its prefill
    step_blocks: int = 4  # prompt blocks computed per step
    max_running: int = 64
    by_arrival: bool = False  # an order to compare with, which no server has
    max_passed_s: float = 5.0


@dataclass(frozen=True, slots=True)
class SimulatedAnswer:
    """The outcome of one request, in simulated seconds and tokens."""

    number: int  # its position in the trace
    arrival_s: float
    begun_s: float  # when it left the queue
    prompt_tokens: int
    hit_tokens: int

    @property
    def waited_s(self) -> float:
        return self.begun_s - self.arrival_s


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """Every request of a trace, in the order of leaving the queue."""

    served: Sequence[SimulatedAnswer]

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were hits."""
        hit = sum(one.hit_tokens for one in self.served)
        return hit / sum(one.prompt_tokens for one in self.served)

    def passed_by_s(self) -> float:
        """The longest time that any request was passed by. It runs from the first later arrival
        that left the queue before it to the last of these."""
        longest = 0.0
        waiting = {one.number: one for one in sorted(self.served, key=lambda one: one.number)}
        first_s: dict[int, float] = {}
        for begun in self.served:
            del waiting[begun.number]
            for number in waiting:
                if number > begun.number:
                    break
                first_s.setdefault(number, begun.begun_s)
                longest = max(longest, begun.begun_s - first_s[number])
        return longest


@dataclass(slots=True)
class _Clock:
    """Simulated nanoseconds."""

    now_ns: int = 1  # 0 means "not yet" in a timeline

    def __call__(self) -> int:
        return self.now_ns

    def pass_s(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


@dataclass(slots=True)
class _TimedRunner(StatelessRunner):
    """Advances the clock by a step's time and chooses token 0."""

    clock: _Clock
    server: SimulatedServer
    tokens_per_token: float  # trace tokens per simulated token

    def step(self, batch: Batch) -> list[Sampled]:
        num_prefill = batch.num_tokens - sum(len(span.tokens) == 1 for span in batch.spans)
        prefill_s = num_prefill * self.tokens_per_token / self.server.prefill_tokens_per_s
        self.clock.pass_s(self.server.step_s + prefill_s)
        return [Sampled(span.sequence_id, 0 if span.sample else None) for span in batch.spans]

    def forget(self, sequence_id: int) -> None:
        pass


def simulate(trace: Trace, server: SimulatedServer) -> SimulatedRun:
    """Serve a trace as it arrives. Deterministic."""
    layout = BlockLayout.uniform(
        num_layers=1, block_size=BLOCK, num_kv_heads=1, head_dim=1, dtype="float16"
    )
    settings = CacheSettings(
        device_bytes=server.capacity_blocks * layout.nbytes, host_bytes=0, share_tails=False
    )
    cache = TieredCache(layout, settings)
    clock = _Clock()
    scale = trace.block_tokens / BLOCK
    finished: dict[str, StepOutput] = {}

    def take(outputs: Sequence[StepOutput]) -> None:
        finished.update((output.request_id, output) for output in outputs if output.last)

    scheduler = SchedulerSettings(
        max_running=server.max_running,
        step_tokens=server.step_blocks * BLOCK,
        mixed_step_tokens=server.step_blocks * BLOCK,
        max_passed_s=server.max_passed_s,
    )
    engine = Engine(
        _TimedRunner(clock, server, scale),
        cache,
        EngineSettings(scheduler=scheduler, max_waiting=len(trace.requests)),
        take,
        clock,
    )
    if server.by_arrival:
        engine._scheduler.waiting._in_line = lambda line, *_: line  # type: ignore[method-assign]
    _drive(engine, clock, deque(_requests(trace)))
    assert len(finished) == len(trace.requests), "a request was not answered"
    cache.residency.check()
    served = sorted(map(_served, finished.values()), key=lambda one: (one.begun_s, one.number))
    return SimulatedRun(served)


def _drive(engine: Engine, clock: _Clock, coming: deque[Request]) -> None:
    """Let the requests arrive at their times, until all are answered."""
    while True:
        while coming and coming[0].arrival_ns <= clock.now_ns:
            engine.submit(coming.popleft())
        if engine.turn():
            continue
        if not coming:
            return
        clock.now_ns = max(clock.now_ns, coming[0].arrival_ns)


def _requests(trace: Trace) -> Iterator[Request]:
    numbers: dict[Hashable, int] = {}
    per_token = trace.block_tokens // BLOCK
    for number, request in enumerate(trace.requests):
        yield Request(
            request_id=str(number),
            tokens=_tokens(request, numbers, per_token),
            params=SamplingParams(
                temperature=0, max_tokens=max(1, request.output_tokens // per_token)
            ),
            scope=CacheScope(),
            arrival_ns=int(request.time_s * 1e9) + 1,
        )


def _tokens(request: TraceRequest, numbers: dict[Hashable, int], per_token: int) -> "array[int]":
    """Tokens that are equal exactly where the trace's block ids are."""
    tokens = array("i")
    for block in request.blocks:
        first = numbers.setdefault(block, len(numbers)) * BLOCK
        tokens.extend(range(first, first + BLOCK))
    return tokens[: max(1, -(-request.input_tokens // per_token))]


def _served(output: StepOutput) -> SimulatedAnswer:
    line = output.timeline
    return SimulatedAnswer(
        number=int(output.request_id),
        arrival_s=line.arrival_ns / 1e9,
        begun_s=line.loaded_ns / 1e9,
        prompt_tokens=output.counts.prompt,
        hit_tokens=output.counts.hit,
    )
