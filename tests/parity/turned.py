"""An engine without a thread over a tiny model, which computes while it is asked."""

from array import array
from collections.abc import Sequence
from typing import Any

from engine.engine import Engine
from engine.execution.runner import ModelRunner
from engine.models.load import LoadedModel
from engine.request import Request, SamplingParams, StepOutput
from engine.scheduling.settings import SchedulerSettings
from engine.settings import EngineSettings
from engine.structure import Grammar
from tiers.blocks.keys import CacheScope
from tiers.cache import CacheSettings, TieredCache

BLOCK = 16


class TurnedEngine:
    """`settings`: of the engine."""

    def __init__(
        self, loaded: LoadedModel, *, blocks: int = 60, step_tokens: int = 64, **settings: Any
    ) -> None:
        layout = loaded.layout(BLOCK)
        tiers = CacheSettings(device_bytes=blocks * layout.nbytes, host_bytes=0)
        self.cache = TieredCache(layout, tiers)
        scheduler = SchedulerSettings(step_tokens=step_tokens, mixed_step_tokens=step_tokens)
        self.engine = Engine(
            ModelRunner(loaded, self.cache.pool.tensor, owners=self.cache.pool.owners),
            self.cache,
            EngineSettings(scheduler=scheduler, **settings),
            lambda outputs: self.outputs.extend(outputs),
        )
        self.outputs: list[StepOutput] = []

    def ask(
        self, *asked: tuple[Sequence[int], SamplingParams], grammar: Grammar | None = None
    ) -> list[list[StepOutput]]:
        """All prompts at once; each one's outputs."""
        self.outputs.clear()
        for number, (prompt, params) in enumerate(asked):
            request = Request(
                request_id=str(number),
                tokens=array("i", prompt),
                params=params,
                scope=CacheScope(layout=self.cache.layout.digest()),
                grammar=grammar,
            )
            self.engine.submit(request)
        while sum(output.last for output in self.outputs) < len(asked):
            self.engine.turn()
        self.cache.residency.check()
        names = map(str, range(len(asked)))
        return [[each for each in self.outputs if each.request_id == name] for name in names]
