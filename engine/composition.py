"""Composes a loaded model, its tiers and the engine over both, for the server.

Nothing starts before `start`. `close` undoes it.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from engine.batch import Batch, Span
from engine.bounds import check_params
from engine.engine import Engine
from engine.execution.runner import ModelRunner
from engine.garbage import freeze_loaded, thaw
from engine.grammar.compiler import GrammarCompiler, compiler_for
from engine.models.arithmetic import processor_name
from engine.models.load import LoadedModel
from engine.openmp import run_apart
from engine.promise import Promise
from engine.request import SamplingParams, StepOutput
from engine.settings import EngineSettings
from tiers.blocks.keys import CacheScope, PrefixKey
from tiers.blocks.layout import BlockLayout
from tiers.cache import CacheSettings, TieredCache
from tiers.disk.format.planes import use_library
from tiers.disk.inspection.view import DiskView
from tiers.operations.face import BlockOperations
from tiers.policy.quota import QuotaShares
from tiers.telemetry.events import EventStream
from tiers.tier import ManagedTier

WARM_UP_ID = -1  # the id of a sequence outside any scheduler
CPU_WARM_TOKENS = 64  # of the first prompt on a CPU, where more gained nothing (docs/measurements)


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Core:
    """A model with its tiers and engine. Invariant: the scope identifies weights and layout.

    The scope is the base model's. Requests for an adapter add its digest.
    """

    loaded: LoadedModel
    layout: BlockLayout
    scope: CacheScope
    cache: TieredCache
    engine: Engine
    runner: ModelRunner
    grammars: GrammarCompiler
    disk_view: Callable[[], AbstractContextManager[DiskView]] | None = None  # None: no disk here

    @property
    def operations(self) -> BlockOperations:
        return self.cache.operations

    def blocks(self, function: Callable[[BlockOperations], T]) -> "Future[T]":
        """As `Engine.call`."""
        return self.engine.call(function)

    @property
    def is_shared(self) -> bool:
        """Whether other servers can load blocks published here."""
        return self.cache.is_shared

    @property
    def facts(self) -> Mapping[str, str]:
        """What computes the answers, for people; the scope has digests of it."""
        loaded = self.loaded
        return {
            "engine": "embedded",
            "device": loaded.device,
            "dtype": loaded.dtype,
            "kv_dtype": self.layout.dtype,
            "processor": processor_name(loaded.device),
            "torch": torch.__version__,
        }

    @property
    def promise(self) -> Promise:
        """What a hit leaves equal."""
        return self.loaded.promise(activated_by_row=self.runner.activates_by_row)

    def tell_owners(self, owners: Mapping[PrefixKey, str]) -> None:
        """Does nothing: the tiers are in this process and read the owners from their `shares`."""

    def start(self, warm_up_tokens: int = 0) -> None:
        """Warm up on the engine thread, with a prompt of `warm_up_tokens` tokens, then take
        requests."""
        engine, runner, cache, layout = self.engine, self.runner, self.cache, self.layout
        operators = self.loaded.operators
        room = cache.pool.num_blocks * layout.block_size
        num_tokens = min(warm_up_tokens, engine.max_tokens, room)
        if self.loaded.device == "cpu":
            num_tokens = min(num_tokens, CPU_WARM_TOKENS)

        def warm_up() -> None:  # holds no reference to this object, so its owner may drop it
            if num_tokens > 1:
                _first_steps(runner, num_tokens, layout.block_size)
            runner.warm_up()
            if operators is not None and (library := operators.loaded) is not None:
                use_library(library)
                for pool in filter(None, (cache.pool, cache.checkpoint_pool)):
                    pool.copy_by(torch.ops.cachesvc.copy)
            cache.warm_up()
            freeze_loaded()

        engine.start(warm_up)

    def close(self, drain_s: float = 0.0, *, flush: bool = True) -> int:
        """Stop the engine, flush memory to disk and close the tiers. Returns the number of unsaved
        blocks."""
        self.engine.close(drain_s)
        self.grammars.close()
        if self.loaded.operators is not None:
            self.loaded.operators.close()
        unsaved = self.cache.close(flush=flush)
        thaw()
        return unsaved

    @property
    def adapters(self) -> Mapping[str, bytes]:
        """Digests of their contents, by name."""
        return self.loaded.adapters.digests


def compose(
    loaded: LoadedModel,
    layout: BlockLayout,
    on_outputs: Callable[[Sequence[StepOutput]], None],
    *,
    cache: CacheSettings,
    disk: ManagedTier | None,
    checkpoint_disk: ManagedTier | None = None,
    pin_folder: Path,
    engine: EngineSettings,
    stream: EventStream | None = None,
    shares: QuotaShares | None = None,
) -> Core:
    """Make tiers and an engine for a loaded model. The model fills in the rest of the settings
    `engine`.

    Takes ownership of `disk`, and of `checkpoint_disk` for a model with recurrent states: they are
    closed with the rest, and also if anything raises here, as the tiers do about sizes. With a
    disk tier, pins are saved in `pin_folder` across a restart.
    """
    try:
        tiers = run_apart(
            lambda: TieredCache(
                layout,
                cache,
                device=loaded.device,
                disk=disk,
                checkpoint_disk=checkpoint_disk,
                stream=stream or EventStream(),
                shares=shares,
                pin_folder=pin_folder if disk is not None else None,
            )
        )
    except BaseException:
        for tier in (disk, checkpoint_disk):
            if tier is not None:
                tier.close()
        raise
    with ExitStack() as opened:
        opened.callback(tiers.close, flush=False)
        states = tiers.checkpoint_pool
        runner = ModelRunner(
            loaded,
            tiers.pool.tensor,
            scratch=tiers.pool.scratch,
            owners=tiers.pool.owners,
            checkpoints=states.tensor if states is not None else None,
            max_running=engine.scheduler.max_running,
        )
        tiers.touch(runner.lazy_memories)
        run_apart(runner.record)
        # A step with rows of an adapter is computed without the recorded forward.
        by_row = runner.activates_by_row and not loaded.adapters.digests
        settings = replace(
            engine,
            max_context=loaded.max_context,
            eos_token_ids=loaded.eos_token_ids,
            adapters=loaded.adapters.digests,
            check_params=partial(check_params, vocab_size=loaded.vocab_size),
        )
        core = Core(
            loaded=loaded,
            layout=layout,
            scope=CacheScope(
                weights=loaded.weights_digest,
                tokenizer=loaded.tokenizer.digest,
                layout=layout.digest(),
                arithmetic=loaded.arithmetic.digest(activated_by_row=by_row),
            ),
            cache=tiers,
            engine=Engine(runner, tiers, settings, on_outputs),
            runner=runner,
            grammars=compiler_for(loaded),
        )
        opened.pop_all()
    return core


def _first_steps(runner: ModelRunner, num_tokens: int, block_size: int) -> None:
    """Run a prefill chunk and a decode step over blocks that nobody owns yet.

    At the first step of each shape, kernels are selected and allocators grow. Without this the
    first request would wait for it.
    """
    tokens = np.zeros(num_tokens - 1, np.int32)
    table = list(range(-(-(len(tokens) + 1) // block_size)))
    greedy = SamplingParams(temperature=0.0)
    chunk = Span(WARM_UP_ID, tokens, 0, table, sample=True, params=greedy)
    step = Span(WARM_UP_ID, tokens[:1], len(tokens), table, sample=True, params=greedy)
    runner.step(Batch([chunk]))
    runner.step(Batch([step]))
    runner.forget(WARM_UP_ID)
