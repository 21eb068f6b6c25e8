"""vLLM's statistics in the server's form: running, waiting, steps, tokens, KV in use.

vLLM calls `record` once per step, on the engine's loop; any thread may read `stats`.
"""

from collections.abc import Callable
from typing import Any

from engine.engine import EngineStats
from engine.scheduling.shares import BeginRate
from tiers.stats import CacheStats


class EngineCounts:
    """Monotonic counters, and the values of the last step."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        self._on_step = on_step
        self.begin_rate = BeginRate()
        self.prompt_computed = 0
        self.kv_usage = 0.0  # of vLLM's own cache, 0 to 1
        self._steps = 0
        self._preemptions = 0
        self._running = 0
        self._waiting = 0
        self._loading = 0

    def logger(self, config: Any, index: int) -> Any:
        """The stat logger for vLLM, which asks for one per engine core."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        record = self.record

        class Steps(StatLoggerBase):  # type: ignore[misc]
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                """Stores nothing."""

            def record(
                self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any
            ) -> None:
                record(scheduler_stats, iteration_stats)

            def log_engine_initialized(self) -> None:
                """Does nothing: the server logs its own start."""

        return Steps(config, index)

    def begun(self, share: str, num_tokens: int) -> None:
        """Counts a completed prompt."""
        self.begin_rate.begun(share, num_tokens)

    def record(self, scheduler: Any, iteration: Any) -> None:
        self._steps += 1
        if scheduler is not None:
            stages = scheduler.num_kv_fetch_reqs_by_stage or {}
            self._loading = sum(stages.values())
            self._running = scheduler.num_running_reqs
            waiting = scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs
            self._waiting = max(0, waiting - self._loading)
            self.kv_usage = scheduler.kv_cache_usage
        if iteration is not None:
            self._preemptions += iteration.num_preempted_reqs
        self._on_step()

    def stats(self, cache: CacheStats, failed: str | None) -> EngineStats:
        return EngineStats(
            num_running=self._running,
            num_waiting=self._waiting,
            num_loading=self._loading,
            num_preemptions=self._preemptions,
            num_steps=self._steps,
            prompt_tokens_computed=self.prompt_computed,
            jumped_tokens=0,
            cache=cache,
            failed=failed,
        )
