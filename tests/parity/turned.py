"""An engine without a thread over a tiny model, which computes while it is asked."""

from engine.engine import Engine
from engine.execution.runner import ModelRunner
from engine.scheduling.settings import SchedulerSettings
from engine.settings import EngineSettings
from tests.support.caches import cache_of
from tests.support.requests import request
from tiers.blocks.keys import CacheScope

BLOCK = 16


class TurnedEngine:
    """`settings`: of the engine."""

    def __init__(self, loaded, *, blocks=60, step_tokens=64, **settings):
        self.cache = cache_of(loaded.layout(BLOCK), blocks)
        scheduler = SchedulerSettings(step_tokens=step_tokens, mixed_step_tokens=step_tokens)
        self.engine = Engine(
            ModelRunner(loaded, self.cache.pool.tensor, owners=self.cache.pool.owners),
            self.cache,
            EngineSettings(scheduler=scheduler, **settings),
            lambda outputs: self.outputs.extend(outputs),
        )
        self.outputs = []

    def ask(self, *asked, grammar=None):
        """All prompts at once; each one's outputs."""
        self.outputs.clear()
        scope = CacheScope(layout=self.cache.layout.digest())
        for number, (prompt, params) in enumerate(asked):
            fields = {"params": params, "scope": scope, "grammar": grammar}
            self.engine.submit(request(prompt, str(number), **fields))
        while sum(output.last for output in self.outputs) < len(asked):
            self.engine.turn()
        self.cache.residency.check()
        names = map(str, range(len(asked)))
        return [[each for each in self.outputs if each.request_id == name] for name in names]
