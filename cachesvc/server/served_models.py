"""The models that clients may name: the loaded one, and one for each of its adapters."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import cachesvc
from api.served_model import ServedModel
from cachesvc.config.sections import ModelSection
from cachesvc.server.backend import Backend
from engine.stats import EngineStats

CONTENTS = ("weights", "tokenizer", "adapter", "layout", "arithmetic")  # of a scope, as digests


@dataclass(frozen=True, slots=True)
class Serving:
    """An engine, and the models that it computes, by name: the loaded one first."""

    core: Backend
    models: Mapping[str, ServedModel]

    @property
    def name(self) -> str:
        return next(iter(self.models))


def stats_of(main: Serving, each: Sequence[Serving]) -> EngineStats:
    """What all engines do, over the cache of the main one."""
    stats = {serving.name: serving.core.engine.stats() for serving in each}
    return replace(
        stats[main.name],
        num_running=sum(one.num_running for one in stats.values()),
        num_waiting=sum(one.num_waiting for one in stats.values()),
        engines=tuple(
            replace(use, model=name) for name, one in stats.items() for use in one.engines
        ),
    )


def served_models(core: Backend, settings: ModelSection) -> Mapping[str, ServedModel]:
    """By name, the loaded model first."""
    loaded, exact = core.loaded, settings.exact
    model = ServedModel(
        name=settings.client_name,
        tokenizer=loaded.tokenizer,
        scope=core.scope,
        max_context=core.engine.max_tokens,
        vocab_size=loaded.vocab_size,
        created=int(time.time()),
        promise=core.promise,
        endpoint=getattr(core, "endpoint", None),  # only a `CoreElsewhere` may have one
        is_absent=getattr(core, "is_absent", False),
    )
    adapted = [
        replace(
            model,
            name=name,
            scope=replace(model.scope, adapter=digest),
            adapter=name,
            parent=model.name,
        )
        for name, digest in core.adapters.items()
    ]
    return {each.name: _with_exactness(each, core, exact) for each in (model, *adapted)}


def _with_exactness(model: ServedModel, core: Backend, exact: str) -> ServedModel:
    """The model with what its clients may know of its exactness: what serves it, and digests of
    all that its blocks depend on besides tokens and tenant."""
    if not core.facts:
        return model
    contents = {name: getattr(model.scope, name).hex() for name in CONTENTS}
    mode = {"cachesvc": cachesvc.__version__, "exact": exact}
    return replace(
        model, exactness={"serves": {"model": model.name, **mode, **core.facts, **contents}}
    )
