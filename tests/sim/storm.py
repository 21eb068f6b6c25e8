"""A storm and a polite tenant before the real engine, in simulated time.

What two tenants get of one engine is decided by its scheduler, so a clock that only the model's
declared time moves shows it without the noise of a machine. For the tests; one thread.
"""

import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.batch import Batch, Sampled
from engine.engine import Engine
from engine.request import Request, SamplingParams, StepOutput
from engine.scheduling.settings import SchedulerSettings
from engine.settings import EngineSettings
from tests.support.chain_runner import ChainRunner, chain_layout
from tiers.blocks.keys import CacheScope
from tiers.cache import CacheSettings, TieredCache


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredModel:
    """What a step takes, and how the engine is set."""

    prefill_tokens_per_s: float = 4_000
    step_s: float = 0.004
    max_running: int = 8
    step_tokens: int = 256
    mixed_step_tokens: int = 64
    block_size: int = 16
    prompt_tokens: int = 256
    output_tokens: int = 8
    max_wait_s: float = 2.0

    @property
    def requests_per_s(self) -> float:
        """What it can serve, all places taken: prefill, and decode steps that all share."""
        prefill_s = self.prompt_tokens / self.prefill_tokens_per_s
        return 1 / (prefill_s + self.output_tokens * self.step_s / self.max_running)


@dataclass(slots=True)
class Storm:
    """What came of it, in simulated seconds."""

    seconds: dict[str, list[float]] = field(default_factory=dict)  # of answers, by tenant
    num_refused: int = 0
    ended_s: float = 0.0

    @property
    def goodput_per_s(self) -> float:
        return sum(map(len, self.seconds.values())) / self.ended_s

    def quantile_s(self, tenant: str, share: float) -> float:
        ordered = sorted(self.seconds[tenant])
        return ordered[int(share * (len(ordered) - 1))]


class _TimedRunner(ChainRunner):
    """Moves the clock by the declared time of each step."""

    model: DeclaredModel
    now_s = 0.0

    def step(self, batch: Batch) -> list[Sampled]:
        prefill = sum(len(span.tokens) for span in batch.spans if len(span.tokens) > 1)
        self.now_s += self.model.step_s + prefill / self.model.prefill_tokens_per_s
        return super().step(batch)


def storm(
    load: float, *, polite: float = 0.1, seconds: float, model: DeclaredModel, seed: int = 1
) -> Storm:
    """The storm asks for `load` times what the model can serve, the polite tenant for `polite`
    times; each at random moments. Nobody asks again when refused."""
    layout = chain_layout(model.block_size)
    blocks = 4096 * 16 // model.block_size
    cache = TieredCache(layout, CacheSettings(device_bytes=blocks * layout.nbytes, host_bytes=0))
    runner = _TimedRunner(cache.pool.tensor)
    runner.model = model
    ended: dict[str, float] = {}

    def take(outputs: "list[StepOutput] | tuple[StepOutput, ...]") -> None:
        ended.update((output.request_id, runner.now_s) for output in outputs if output.last)

    settings = EngineSettings(
        scheduler=SchedulerSettings(
            max_running=model.max_running,
            step_tokens=model.step_tokens,
            mixed_step_tokens=model.mixed_step_tokens,
        ),
        max_waiting=1 << 20,
    )
    engine = Engine(runner, cache, settings, take, lambda: int(runner.now_s * 1e9))  # type: ignore[arg-type]
    rates = {"storm": load * model.requests_per_s, "polite": polite * model.requests_per_s}
    dice = random.Random(seed)
    arrivals = sorted(
        (at_s, tenant)
        for tenant, rate in rates.items()
        for at_s in _moments(random.Random(f"{seed} {tenant}"), rate, seconds)
    )
    result, asked = Storm(seconds={tenant: [] for tenant in rates}), {}
    coming = iter([*arrivals, (float("inf"), "")])
    at_s, tenant = next(coming)
    while at_s < float("inf") or len(ended) < len(asked):
        while at_s <= runner.now_s:
            if engine.predicted_wait_s(tenant, model.prompt_tokens) > model.max_wait_s:
                result.num_refused += 1
            else:
                name = f"{tenant} {len(asked)}"
                asked[name] = (tenant, at_s)
                engine.submit(_request(name, tenant, dice, model))
            at_s, tenant = next(coming)
        if not engine.turn():
            runner.now_s = at_s
    for name, (tenant, at_s) in asked.items():
        result.seconds[tenant].append(ended[name] - at_s)
    result.ended_s = runner.now_s
    return result


def _request(name: str, tenant: str, dice: random.Random, model: DeclaredModel) -> Request:
    return Request(
        request_id=name,
        tokens=array("i", [dice.randrange(256) for _ in range(model.prompt_tokens)]),
        params=SamplingParams(max_tokens=model.output_tokens),
        scope=CacheScope(tenant=tenant.encode()),
        share=tenant,
    )


def _moments(dice: random.Random, rate: float, seconds: float) -> Iterator[float]:
    at_s = dice.expovariate(rate) if rate else seconds
    while at_s < seconds:
        yield at_s
        at_s += dice.expovariate(rate)


def main() -> None:
    """A row for each load: `python -m tests.sim.storm`."""
    for load in (0, 1, 2, 5, 10):
        found = storm(load, seconds=300, model=DeclaredModel())
        storms = f"{found.quantile_s('storm', 0.99):.2f}" if load else "-"
        polite = f"{found.quantile_s('polite', 0.5):.3f} | {found.quantile_s('polite', 0.99):.3f}"
        print(f"| {load}x | {found.goodput_per_s:.1f} | {storms} | {polite} |", flush=True)


if __name__ == "__main__":
    main()
