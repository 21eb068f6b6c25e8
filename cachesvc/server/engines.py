"""Prepares each model's engine from its settings, wherever it runs.

Only what a model needs is imported: torch by an engine here, and the tokenizers by one that takes
tokens at a URL. Called by the server on a thread of its own.
"""

import asyncio
from collections.abc import Callable

from cachesvc.config.settings import Settings
from cachesvc.server.backend import Backend, Deliver, MakeBackend
from engine.errors import ModelError
from engine.openmp import run_apart
from engine.remote.find import is_no_token_engine

TIER_SIZES = ("device_bytes", "host_bytes", "disk_bytes")  # settings of this process's own tiers


def prepare(
    settings: Settings, progress: Callable[[str, float], None] | None = None
) -> tuple[Settings, MakeBackend]:
    """Does the slow work before the tiers are opened: loads a model that is computed here.

    Returns the settings with what depends on the device filled in. Raises ModelError or
    ConfigError, with the reason.
    """
    if settings.engine.urls:
        return _at_urls(settings, progress)
    from cachesvc.server import compute

    if settings.engine.backend == "embedded":
        return compute.prepare(settings, progress)
    started = compute.sized(settings, "cpu")  # on a GPU vLLM sizes its own cache

    def make(on_outputs: Deliver, *_: object) -> Backend:
        from cachesvc.server.vllm.elsewhere import build

        return build(started, on_outputs, progress)

    return started, make


def _at_urls(
    settings: Settings, progress: Callable[[str, float], None] | None
) -> tuple[Settings, MakeBackend]:
    if settings.model.exact == "always":
        raise ModelError("model.exact is always, but nothing is promised of an engine at a URL")
    engine = settings.engine
    none = settings.cache.model_copy(update=dict.fromkeys(TIER_SIZES, 0))
    settings = settings.model_copy(update={"cache": none})

    def passes() -> bool:
        """Whether requests pass to the engine as they are: if its user says so, or if it takes no
        tokens."""
        key = engine.key.get_secret_value()
        return engine.is_relay or run_apart(
            lambda: asyncio.run(is_no_token_engine(engine.urls, key))
        )

    def make(on_outputs: Deliver, *_: object) -> Backend:
        if passes():
            from cachesvc.server.relay.core import build

            return build(settings, on_outputs)
        from cachesvc.server.vllm.elsewhere import build as build_elsewhere

        return build_elsewhere(settings, on_outputs, progress)

    return settings, make
