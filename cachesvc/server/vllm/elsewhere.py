"""Builds the compute half of a server whose engine runs elsewhere, at a URL.

The counterpart of `cachesvc.server.compute`.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cachesvc.config.errors import ConfigError
from cachesvc.config.places import models_path
from cachesvc.config.settings import Settings
from cachesvc.server.vllm.adapters import read_adapters
from cachesvc.server.vllm.tiers import OperationsElsewhere, cache_stats
from engine.bounds import check_params
from engine.errors import ModelError
from engine.grammar.compiler import compiler_for
from engine.hardware import run_apart
from engine.models.describe import Spoken, describe_folder
from engine.promise import Equal, Promise
from engine.remote.client import EngineHttp
from engine.remote.engine import RemoteEngine
from engine.remote.find import Found, Meant, find
from engine.remote.grammars import CheckedGrammars
from engine.request import StepOutput
from engine.text.detokenizer import IncrementalDetokenizer
from tiers.blocks.keys import CacheScope, PrefixKey
from tiers.blocks.layout import BlockLayout
from tiers.node.messages import engine_layout
from tiers.telemetry.events import EventStream

logger = logging.getLogger(__name__)

PLAIN = Promise(Equal.NONE, "the engine chooses kernels by the number of rows")
_CONTEXT = "max-model-len"  # of vLLM's arguments, the one that holds for any engine


@dataclass(frozen=True, slots=True)
class Adapters:
    """LoRA adapters by name, with the content digests used in scopes."""

    digests: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class ModelElsewhere:
    """The part of the served model that the wire needs."""

    name: str
    spoken: Spoken
    max_context: int
    adapters: Adapters
    images: None = None  # even if the model reads images, it gets only tokens here

    @property
    def tokenizer(self) -> Any:
        return self.spoken.tokenizer

    @property
    def vocab_size(self) -> int:
        return self.spoken.vocab_size


@dataclass(frozen=True, slots=True)
class CoreElsewhere:
    """Takes the place of `engine.composition.Core`."""

    loaded: ModelElsewhere
    layout: BlockLayout
    scope: CacheScope
    operations: OperationsElsewhere
    engine: RemoteEngine
    grammars: CheckedGrammars
    promise: Promise = PLAIN
    disk_view: None = None  # the engine has what there is
    is_shared: bool = False

    @property
    def facts(self) -> Mapping[str, str]:
        """Empty: nothing here reads the contents of the model."""
        return {}

    def start(self, warm_up_tokens: int = 0) -> None:
        """Does nothing: the engine is warm."""

    def tell_owners(self, owners: Mapping[PrefixKey, str]) -> None:
        """Does nothing: no tier here has quotas."""

    def close(self, drain_s: float = 0.0) -> int:
        """The engine keeps running."""
        self.engine.close(drain_s)
        self.grammars.close()
        return 0

    def detokenizer(
        self, stop: Sequence[str], *, shown: Sequence[str] = ()
    ) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self.loaded.tokenizer, stop, shown=shown)


def build_at_url(
    settings: Settings,
    on_outputs: Callable[[Sequence[StepOutput]], None],
    stream: EventStream,
    progress: Callable[[str, float], None] | None = None,
) -> CoreElsewhere:
    """Finds the model's text side here, and the engine that serves it. Raises ConfigError and
    ModelError."""
    if settings.model.exact == "always":
        raise ModelError("model.exact is always, but nothing is promised of an engine elsewhere")
    logger.info(PLAIN.text)
    spoken = describe_folder(settings.model.name, models_path(settings.server.data_dir), progress)
    adapters = read_adapters(settings.model.adapters)
    http = EngineHttp(settings.engine.url)
    meant = Meant(
        names=(settings.model.name, str(spoken.folder)),
        tokenizer=spoken.tokenizer,
        end=spoken.eos_token_ids,
        adapters=tuple(adapters),
        max_tokens=_asked_context(settings),
    )
    found = run_apart(lambda: asyncio.run(find(http, meant)))
    engine = RemoteEngine(
        http,
        found.remote,
        on_outputs,
        max_waiting=settings.engine.max_waiting,
        check_params=partial(check_params, vocab_size=spoken.vocab_size),
    )
    layout = engine_layout(1, 1, found.remote.block_size, "float32")
    operations = OperationsElsewhere(layout, None, found.num_blocks)
    engine.use(operations, partial(_stats, layout, stream, engine, found))
    engine.start()
    digests = {name: adapter.digest for name, adapter in adapters.items()}
    return CoreElsewhere(
        loaded=ModelElsewhere(settings.model.name, spoken, engine.max_tokens, Adapters(digests)),
        layout=layout,
        scope=CacheScope(weights=str(spoken.folder).encode(), tokenizer=spoken.tokenizer.digest),
        operations=operations,
        engine=engine,
        grammars=CheckedGrammars(compiler_for(spoken)),
    )


def _asked_context(settings: Settings) -> int | None:
    given = {name.replace("_", "-"): value for name, value in settings.engine.vllm.items()}
    asked = given.pop(_CONTEXT, None)
    if given:
        raise ConfigError(
            f"the engine at {settings.engine.url} runs already, so engine.vllm has no effect on "
            f"it: leave {', '.join(given)} out, or give it to that engine"
        )
    return None if asked is None else int(asked)


def _stats(layout: BlockLayout, stream: EventStream, engine: RemoteEngine, found: Found) -> Any:
    return cache_stats(layout, stream, engine, None, found.num_blocks)
