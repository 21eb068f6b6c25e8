"""The models that clients may name: the loaded one, and one for each of its adapters."""

import time
from collections.abc import Mapping
from dataclasses import replace

import cachesvc
from api.served_model import ServedModel
from cachesvc.server.backend import Backend

CONTENTS = ("weights", "tokenizer", "adapter", "layout", "arithmetic")  # of a scope, as digests


def served_models(core: Backend, exact: str) -> Mapping[str, ServedModel]:
    """By name, the loaded model first. `exact` is the setting of that name."""
    loaded = core.loaded
    model = ServedModel(
        name=loaded.name,
        tokenizer=loaded.tokenizer,
        detokenizer=core.detokenizer,
        scope=core.scope,
        max_context=min(loaded.max_context, core.engine.max_tokens),
        vocab_size=loaded.vocab_size,
        created=int(time.time()),
        promise=core.promise,
        endpoint=getattr(core, "endpoint", None),  # only a `RelayCore` has one
    )
    adapted = [
        replace(
            model,
            name=name,
            scope=replace(model.scope, adapter=digest),
            adapter=name,
            parent=model.name,
        )
        for name, digest in loaded.adapters.digests.items()
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
