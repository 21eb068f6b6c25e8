"""The compute half, built from settings: the loaded model, its tiers, and the engine over both.

Used by the server and by `cachesvc bench`. Nothing starts before `start`; `close` undoes it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from cachesvc.config import CacheSection, EngineSection, ModelSection, disk_path, models_path
from engine.batch import Batch, Span
from engine.engine import Engine, EngineSettings
from engine.execution.runner import Runner
from engine.execution.sampler import check_params
from engine.grammar.compiler import GrammarCompiler, compiler_for
from engine.hardware import pick_device, set_threads
from engine.models.load import LoadedModel, load_adapter, load_model
from engine.request import SamplingParams, StepOutput
from engine.scheduling.queue import QueueOrder
from engine.scheduling.scheduler import SchedulerSettings
from engine.text.detokenizer import IncrementalDetokenizer
from tiers.blocks.keys import CacheScope
from tiers.blocks.layout import BlockLayout
from tiers.cache import CacheSettings, TieredCache
from tiers.disk.open import open_disk
from tiers.disk.settings import DiskOrder, DiskSettings
from tiers.operations.operations import UpkeepSettings
from tiers.policy.admission import Promotion, WritePolicy
from tiers.policy.quota import Shares
from tiers.telemetry.events import EventStream
from tiers.tier import Tier

WARM_UP_ID = -1  # of a sequence that no scheduler numbers

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Core:
    """A model with its tiers and its engine. Invariant: the scope names weights and layout.

    The scope is the base model's; an adapter's requests add its digest.
    """

    loaded: LoadedModel
    layout: BlockLayout
    scope: CacheScope
    cache: TieredCache
    engine: Engine
    runner: Runner
    grammars: GrammarCompiler

    def start(self) -> None:
        self.engine.start()

    def warm_up(self, num_tokens: int) -> None:
        """Before `start`: run a chunk and a decode step over blocks that nobody owns yet.

        Kernels choose their form and allocators grow at the first step of each shape, which the
        first request would wait for: 0.7 s of 3.5 for 2,250 tokens on two cores.
        """
        room = self.cache.pool.num_blocks * self.layout.block_size
        tokens = np.zeros(min(num_tokens, self.engine.max_tokens, room) - 1, np.int32)
        table = list(range(-(-(len(tokens) + 1) // self.layout.block_size)))
        greedy = SamplingParams(temperature=0.0)
        chunk = Span(WARM_UP_ID, tokens, 0, table, sample=True, params=greedy)
        step = Span(WARM_UP_ID, tokens[:1], len(tokens), table, sample=True, params=greedy)
        self.runner.step(Batch([chunk]))
        self.runner.step(Batch([step]))
        self.runner.forget(WARM_UP_ID)
        self.runner.warm_up()
        self.cache.warm_up()

    def close(self, drain_s: float = 0.0, *, flush: bool = True) -> int:
        """Stop the engine, flush memory to disk, close the tiers; returns blocks not saved."""
        self.engine.close(drain_s)
        self.grammars.close()
        return self.cache.close(flush=flush)

    def detokenizer(self, stop: Sequence[str]) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self.loaded.tokenizer, stop)


def load(settings: ModelSection, data_dir: Path, progress: Progress | None = None) -> LoadedModel:
    """Load the model and its adapters. Raises ModelError, with the reason, for what cannot be
    served."""
    if settings.threads:
        set_threads(settings.threads)
    cache_dir = models_path(data_dir)
    cache_dir.mkdir(parents=True, exist_ok=True)
    loaded = load_model(
        settings.name,
        device=pick_device(settings.device),
        dtype=settings.dtype,
        cache_dir=cache_dir,
        progress=progress,
    )
    for name, source in settings.adapters.items():
        load_adapter(loaded, name, source)
    return loaded


def build(
    loaded: LoadedModel,
    *,
    kv_dtype: str,
    cache: CacheSection,
    engine: EngineSection,
    data_dir: Path,
    on_outputs: Callable[[Sequence[StepOutput]], None],
    stream: EventStream | None = None,
    shares: Shares | None = None,
) -> Core:
    """Tiers and engine for a loaded model. Raises what the tiers say of sizes and directories."""
    layout = loaded.layout(cache.block_size, None if kv_dtype == "auto" else kv_dtype)
    stream = stream or EventStream()
    disk = _open_disk(layout, cache, data_dir, stream, shares)
    try:
        tiers = TieredCache(
            layout,
            _cache_settings(cache),
            device=loaded.device,
            disk=disk,
            stream=stream,
            shares=shares,
            pin_folder=disk_path(data_dir) if disk is not None else None,
        )
    except BaseException:
        if disk is not None:
            disk.close()
        raise
    runner = Runner(loaded, tiers.pool.tensor)
    return Core(
        loaded=loaded,
        layout=layout,
        scope=CacheScope(
            weights=loaded.weights_digest,
            tokenizer=loaded.tokenizer.digest,
            layout=layout.digest(),
        ),
        cache=tiers,
        engine=Engine(runner, tiers, _engine_settings(engine, loaded), on_outputs),
        runner=runner,
        grammars=compiler_for(loaded, timeout_s=engine.grammar_timeout),
    )


def _open_disk(
    layout: BlockLayout,
    cache: CacheSection,
    data_dir: Path,
    stream: EventStream,
    shares: Shares | None,
) -> Tier | None:
    if not cache.disk_bytes or not cache.host_bytes:
        return None
    above = cache.device_bytes + cache.host_bytes
    behaviour = DiskSettings(
        order=DiskOrder(cache.disk_order),
        moves=not Promotion(cache.promotion).keeps(above, above + cache.disk_bytes),
        idle_ttl_s=int(cache.idle_ttl) or None,
        write_budget_bytes=cache.write_budget_bytes or None,
    )
    return open_disk(
        disk_path(data_dir),
        layout,
        cache.disk_bytes,
        num_shards=cache.disk_shards,
        settings=behaviour,
        shares=shares,
        stream=stream,
    )


def _cache_settings(cache: CacheSection) -> CacheSettings:
    return CacheSettings(
        device_bytes=cache.device_bytes,
        host_bytes=cache.host_bytes,
        policy=cache.policy,
        write_policy=WritePolicy(cache.write_policy),
        num_readers=cache.readers,
        share_tails=cache.partial_blocks,
        weigh_loads=cache.weigh_loads,
        promotion=Promotion(cache.promotion),
        upkeep=UpkeepSettings(
            device_idle_s=cache.device_idle_ttl or None,
            host_idle_s=cache.host_idle_ttl or None,
            pinned_share=cache.pinned_share,
        ),
    )


def _engine_settings(engine: EngineSection, loaded: LoadedModel) -> EngineSettings:
    return EngineSettings(
        scheduler=SchedulerSettings(
            max_running=engine.max_running,
            step_tokens=engine.chunk_tokens,
            mixed_step_tokens=engine.mixed_chunk_tokens,
            order=QueueOrder(engine.order),
            max_passed_s=engine.max_passed,
        ),
        max_waiting=engine.max_waiting,
        jump_forward=engine.jump_forward,
        max_context=loaded.max_context,
        eos_token_ids=loaded.eos_token_ids,
        adapters=loaded.adapters.digests,
        check_params=partial(check_params, vocab_size=loaded.vocab_size),
    )
