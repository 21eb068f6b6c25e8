"""The engine in service: the pause that others see while a prompt arrives or rises from the host.

A promotion of 8k tokens of an 8B shape is 1.07 GB, 20 ms at 55 GB/s; of 64k, 160 ms. Copies run
beside compute, so nobody's pause should grow by them: only by the prompt's own last chunk.
"""

import itertools
import statistics
import time
from array import array
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from engine.engine import Engine
from engine.execution.runner import ModelRunner
from engine.request import Request, SamplingParams, StepOutput
from engine.scheduling.settings import SchedulerSettings
from engine.settings import EngineSettings
from tests.bench.gpu_check.device import BLOCK, TINY, described, random_model, shape
from tiers.blocks.keys import CacheScope
from tiers.cache import CacheSettings, TieredCache

STREAMS = 8
GIVE_UP_S = 300.0


class Service:
    """A model served by its engine; remembers when each token came."""

    def __init__(self, device: str, small: bool) -> None:
        self.sizes = (256, 1024) if small else (8 << 10, 64 << 10)
        config = TINY if small else shape(32, 4096, 32, 8, 14336, 2 * self.sizes[-1])
        loaded = described(random_model(config, device), device)
        layout = loaded.layout(BLOCK)
        largest = self.sizes[-1] // BLOCK
        spare = STREAMS * (64 if small else 1024) // BLOCK + 8
        self.cache = TieredCache(
            layout,
            CacheSettings(
                device_bytes=(largest + spare + largest // 4) * layout.nbytes,
                host_bytes=2 * (largest + spare) * layout.nbytes,
                weigh_loads=False,
            ),
            device=device,
        )
        runner = ModelRunner(loaded, self.cache.pool.tensor, scratch=self.cache.pool.scratch)
        self.scope = CacheScope(weights=bytes(16), tokenizer=bytes(16), layout=layout.digest())
        self.times: dict[str, list[float]] = defaultdict(list)
        self.last: dict[str, StepOutput] = {}
        settings = EngineSettings(scheduler=SchedulerSettings(), max_context=loaded.max_context)
        self.engine = Engine(runner, self.cache, settings, self._take)
        self._names = itertools.count()
        self.engine.start(runner.warm_up)

    def _take(self, outputs: Sequence[StepOutput]) -> None:
        now = time.perf_counter()
        for output in outputs:
            self.times[output.request_id] += [now] * len(output.tokens)
            if output.last:
                self.last[output.request_id] = output

    def ask(self, seed: int, num_tokens: int, max_tokens: int) -> str:
        name = f"request-{next(self._names)}"
        tokens = array("i", ((seed * 7919 + 31 * i) % 40_000 + 100 for i in range(num_tokens)))
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)
        self.engine.submit(Request(request_id=name, tokens=tokens, params=params, scope=self.scope))
        return name

    def wait(self, names: Sequence[str], num_tokens: int | None = None) -> None:
        """Until each has as many tokens, or has ended."""
        give_up = time.monotonic() + GIVE_UP_S
        for name in names:
            while name not in self.last and (
                num_tokens is None or len(self.times[name]) < num_tokens
            ):
                if time.monotonic() > give_up:
                    raise TimeoutError(f"{name} has {len(self.times[name])} tokens")
                time.sleep(0.001)

    def close(self) -> None:
        self.engine.close()
        self.cache.close(flush=False)


def check(device: str, small: bool) -> dict[str, Any]:
    service = Service(device, small)
    try:
        compiled = _num_compiled()
        figures: dict[str, Any] = {
            f"promotion_{size}": _promotion(service, size) for size in service.sizes
        }
        figures["arrivals"] = _arrivals(service, service.sizes[0] // 4)
        figures["compiled"] = {
            "what": "kernels compiled in service",
            "number": _num_compiled() - compiled,
            "ok": _num_compiled() == compiled,
        }
        return figures
    finally:
        service.close()


def _promotion(service: Service, size: int) -> dict[str, Any]:
    """Tokens of eight streams while a prompt of `size` tokens comes back from the host."""
    service.wait([service.ask(size, size, 1)])
    for other in range(2):  # they take its place on the device
        service.wait([service.ask(size + 1 + other, service.sizes[-1], 1)])
    streams = _streams(service)
    begun = time.perf_counter()
    risen = service.ask(size, size, 1)
    service.wait([risen])
    counts = service.last[risen].counts
    first = service.times[risen][0]
    gaps = _gaps(service, streams, begun, first + 0.05)
    service.wait(streams)
    return {
        "what": f"a promotion of {size} tokens",
        "first_token_ms": round((first - begun) * 1e3, 2),
        "hit_host": counts.hit_host,
        "hit_device": counts.hit_device,
        "ok": counts.hit_host > 0,
        "gaps_ms": gaps,
    }


def _arrivals(service: Service, size: int) -> dict[str, Any]:
    """Tokens of eight streams while new prompts arrive, one after another."""
    streams = _streams(service)
    begun = time.perf_counter()
    for seed in range(4):
        service.wait([service.ask(5000 + seed, size, 1)])
    ended = time.perf_counter()
    gaps = _gaps(service, streams, begun, ended)
    service.wait(streams)
    return {"prompt_tokens": size, "seconds": round(ended - begun, 3), "gaps_ms": gaps}


def _streams(service: Service) -> list[str]:
    streams = [service.ask(900 + n, BLOCK // 2, 400) for n in range(STREAMS)]
    service.wait(streams, num_tokens=10)
    return streams


def _gaps(service: Service, streams: Sequence[str], begun: float, ended: float) -> dict[str, float]:
    """Between a stream's tokens: before `begun`, and those that overlap the time to `ended`."""
    quiet, busy = [], []
    for name in streams:
        for before, after in itertools.pairwise(list(service.times[name])):
            if after < begun:
                quiet.append((after - before) * 1e3)
            elif before < ended:
                busy.append((after - before) * 1e3)
    return {
        "quiet_median": round(statistics.median(quiet), 3),
        "median": round(statistics.median(busy), 3) if busy else 0.0,
        "largest": round(max(busy, default=0.0), 3),
    }


def _num_compiled() -> int:
    """Forms of the kernels that stand compiled; 0 where there are none."""
    try:
        from engine.attention.kernels import _paged_kernel
    except ImportError:
        return 0
    caches: dict[Any, Any] = getattr(_paged_kernel, "device_caches", {})
    return sum(len(cache[0]) for cache in caches.values())
