"""A real engine over its tiers in a folder, and one prompt asked from each of them."""

import queue
from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

from engine.engine import Engine
from engine.execution.runner import ModelRunner
from engine.models.load import LoadedModel
from engine.request import FinishReason, Request, SamplingParams, StepOutput, TokenCounts
from engine.scheduling.settings import SchedulerSettings
from engine.settings import EngineSettings
from engine.structure import Grammar
from tiers.blocks.contents import Content
from tiers.blocks.keys import CacheScope
from tiers.cache import CacheSettings, TieredCache
from tiers.disk.open import open_disk
from tiers.disk.tier import DiskTier
from tiers.group import CacheGroup
from tiers.tier import ManagedTier

BLOCK = 16
NUM_OUT = 8


class House:
    """One engine over its tiers in a folder; closing flushes, so that a second one restarts."""

    def __init__(
        self,
        loaded: LoadedModel,
        folder: Path,
        *,
        device_blocks: int = 40,
        host_blocks: int = 64,
        step_tokens: int = 64,
        kv_dtype: str | None = None,
        share_tails: bool = True,
        above: Callable[[DiskTier], ManagedTier] = lambda disk: disk,
        device: str = "cpu",
    ) -> None:
        layout = loaded.layout(BLOCK, kv_dtype)
        device_bytes, host_bytes = device_blocks * layout.nbytes, host_blocks * layout.nbytes
        share = 0.0
        states = None
        if layout.states:
            own = layout.checkpoint
            share = 20 * own.nbytes / (device_bytes + 20 * own.nbytes)
            device_bytes = round(device_bytes / (1 - share))
            host_bytes = round(host_bytes / (1 - share))
            states = open_disk(folder.with_name(f"{folder.name}-states"), own, 64 << 20)
        settings = CacheSettings(
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            weigh_loads=False,
            share_tails=share_tails,
            checkpoint_share=share,
        )
        disk = above(open_disk(folder, layout, 64 << 20))
        self.cache = TieredCache(layout, settings, device=device, disk=disk, checkpoint_disk=states)
        states_pool = self.cache.checkpoint_pool
        scheduler = SchedulerSettings(step_tokens=step_tokens, mixed_step_tokens=step_tokens)
        self._outputs: queue.Queue[StepOutput] = queue.Queue()
        runner = ModelRunner(
            loaded,
            self.cache.pool.tensor,
            scratch=self.cache.pool.scratch,
            owners=self.cache.pool.owners,
            checkpoints=states_pool.tensor if states_pool is not None else None,
        )
        self.engine = Engine(
            runner,
            self.cache,
            EngineSettings(scheduler=scheduler, max_context=1024, adapters=loaded.adapters.digests),
            self._take,
        )
        self._adapters = loaded.adapters.digests
        self.told: list[StepOutput] = []  # what the last prompts were answered with
        self.engine.start(runner.warm_up if device != "cpu" else lambda: None)

    def _take(self, outputs: Sequence[StepOutput]) -> None:
        for output in outputs:
            self._outputs.put(output)

    def close(self) -> None:
        self.engine.close()
        assert self.cache.close() == 0
        self.cache.residency.check()

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        cache: bool = True,
        adapters: Sequence[str | None] = (),
        contents: Sequence[tuple[Content, ...]] = (),
        n: int = 1,
        logprobs: int | None = None,
        grammar: Grammar | None = None,
    ) -> list[tuple[list[int], TokenCounts]]:
        """All prompts at once, each with its adapter and contents; each one's tokens and counts.
        The tokens of `n` samples come one after another."""
        params = SamplingParams(
            temperature=0, max_tokens=NUM_OUT, ignore_eos=True, n=n, logprobs=logprobs
        )
        for number, prompt in enumerate(prompts):
            adapter = adapters[number] if adapters else None
            digest = self._adapters[adapter] if adapter is not None else b""
            self.engine.submit(
                Request(
                    request_id=str(number),
                    tokens=array("i", prompt),
                    params=params,
                    scope=CacheScope(layout=self.cache.layout.digest(), adapter=digest),
                    adapter=adapter,
                    contents=contents[number] if contents else (),
                    cache=cache,
                    grammar=grammar,
                )
            )
        answers: dict[str, list[list[int]]] = {
            str(number): [[] for _ in range(n)] for number in range(len(prompts))
        }
        counts: dict[str, TokenCounts] = {}
        self.told.clear()
        while len(counts) < len(prompts):
            output = self._outputs.get(timeout=60)
            self.told.append(output)
            answers[output.request_id][output.index] += output.tokens
            if output.last:
                assert output.finish is FinishReason.LENGTH, output
                counts[output.request_id] = output.counts
        return [([*chain(*samples)], counts[name]) for name, samples in answers.items()]

    def sink(self, *, to_disk: bool) -> None:
        """Push every block off the device, and with `to_disk` out of the host as well."""

        def down(groups: list[CacheGroup]) -> None:
            for group in groups:
                if to_disk:
                    assert group.flush() == 0
                for block in [*group.index, *group.index.iter_partials()]:
                    if block.slot is not None:
                        group.residency.evict_device(block)
                for block in [*group.index]:
                    if to_disk and block.frame is not None:
                        group.residency.evict_host(block)

        groups = [group for group in (self.cache.group, self.cache) if group is not None]
        self.engine.call(lambda _: down(groups)).result(60)


Answer = tuple[list[int], TokenCounts]
TIERS = ("hit", "hit", "hit_device", "hit_host", "hit_disk", "hit_disk")


def from_every_tier(
    build: Callable[[], House],
    ask: Callable[..., list[Answer]],
    beside: Callable[[House], None] = lambda house: None,
) -> tuple[list[list[int]], list[int]]:
    """Answers to one prompt and the tokens that hit: with the cache off, cold, from the device, the
    host and the disk, and after a restart. `beside` is asked before that."""
    first = build()
    try:
        served = [ask(first, cache=False), ask(first), ask(first)]
        for to_disk in (False, True):
            first.sink(to_disk=to_disk)
            served.append(ask(first))
        beside(first)
    finally:
        first.close()
    second = build()
    try:
        served.append(ask(second))
    finally:
        second.close()
    told = [one for [one] in served]
    hits = [getattr(counts, tier) for (_, counts), tier in zip(told, TIERS, strict=True)]
    assert told[0][1].prompt == told[0][1].miss, "the cache is off"
    return [answer for answer, _ in told], hits
