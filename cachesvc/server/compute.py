"""Builds the compute half from settings: the model, its tiers, and the engine over both.

Used by the server and by `cachesvc bench`. `engine.composition` joins the parts.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cachesvc.config.errors import ConfigError
from cachesvc.config.places import disk_path, models_path, states_path
from cachesvc.config.sections import CacheSection, EngineSection, ModelSection
from cachesvc.config.settings import Settings
from cachesvc.operator.scopes import other_arithmetics
from cachesvc.server.backend import Deliver, MakeBackend
from cachesvc.server.memory import full_caches, largest, warn_of_limit
from cachesvc.server.remote import remote_settings
from engine.composition import Core, compose
from engine.errors import ModelError
from engine.hardware import default_step_tokens, pick_device, spare_bytes
from engine.models.load import LoadedModel, load_adapter, load_model
from engine.openmp import run_apart
from engine.promise import Equal, Promise
from engine.scheduling.settings import SchedulerSettings
from engine.settings import EngineSettings
from tiers.blocks.keys import CacheScope
from tiers.blocks.layout import BlockLayout
from tiers.cache import CHECKPOINT_SHARE, CacheSettings
from tiers.disk.directory import note_elsewhere, read_meta, remove_shards
from tiers.disk.open import open_disk
from tiers.disk.settings import DiskSettings
from tiers.disk.tier import DiskTier
from tiers.errors import MissReason
from tiers.policy.admission import WritePolicy, keeps_copies
from tiers.policy.quota import QuotaShares
from tiers.remote.stacked import StackedTier, stack
from tiers.telemetry.events import EventStream

Progress = Callable[[str, float], None]

# Number of LMDB files in a new disk tier, at most one per GiB. An existing tier keeps its number.
NEW_SHARDS = 2

logger = logging.getLogger(__name__)


def prepare(settings: Settings, progress: Progress | None = None) -> tuple[Settings, MakeBackend]:
    """Loads the model, and fills in what depends on its device."""
    loaded = load(settings.model, settings.server.data_dir, progress)
    filled = sized(settings, loaded.device)
    warn_of_limit(full_caches(filled.cache, on_gpu=loaded.device != "cpu"))
    return filled, over(loaded, filled)


def sized(settings: Settings, device: str) -> Settings:
    """The settings with sizes that depend on the device."""
    cache = settings.cache
    if not cache.device_bytes:
        cache = cache.model_copy(update={"device_bytes": spare_bytes(device)})
    chunk = {"chunk_tokens": step_tokens(settings.engine, device)}
    engine = settings.engine.model_copy(update=chunk)
    return settings.model_copy(update={"cache": cache, "engine": engine})


def step_tokens(engine: EngineSection, device: str) -> int:
    return engine.chunk_tokens or default_step_tokens(device)


def over(loaded: LoadedModel, settings: Settings) -> MakeBackend:
    """The builder of tiers and embedded engine for a loaded model."""

    def make(on_outputs: Deliver, stream: EventStream, shares: QuotaShares | None) -> Core:
        try:
            core = build(loaded, settings, on_outputs, stream, shares)
        except MemoryError as error:
            caches = full_caches(settings.cache, on_gpu=loaded.device != "cpu")
            raise ConfigError(
                f"the caches do not fit the memory of this machine: lower {largest(caches)}"
            ) from error
        try:
            _tell(core.promise, settings.model)
        except ModelError:
            core.close(flush=False)
            raise
        return core

    return make


def load(settings: ModelSection, data_dir: Path, progress: Progress | None = None) -> LoadedModel:
    """Loads the model and its adapters. Raises ModelError, with the reason, if they cannot be
    served."""
    cache_dir = models_path(data_dir)
    cache_dir.mkdir(parents=True, exist_ok=True)

    def loading() -> LoadedModel:
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

    return run_apart(loading)


def _tell(promise: Promise, settings: ModelSection) -> None:
    """Say what a hit leaves equal. Raises ModelError if the bits must be and cannot be promised."""
    if settings.exact == "always" and promise.equal is not Equal.BITS:
        raise ModelError(
            f"model.exact is always, but equal bits cannot be promised here: {promise.reason}. Set "
            f"it to auto to serve without that promise"
        )
    logger.info(promise.text)


def build(
    loaded: LoadedModel,
    settings: Settings,
    on_outputs: Deliver,
    stream: EventStream,
    shares: QuotaShares | None = None,
) -> Core:
    """Tiers and engine for a loaded model. Raises the tiers' errors on sizes and directories."""
    cache, data_dir, layout = settings.cache, settings.server.data_dir, layout_of(loaded, settings)
    states = _open_states(layout, cache, data_dir, shares)
    if states is not None:
        left = cache.disk_bytes - states.stats().setting_bytes
        cache = cache.model_copy(update={"disk_bytes": left})
    elsewhere = loaded.device != "cpu"
    disk = _open_disk(layout, cache, data_dir, stream, shares, computes_elsewhere=elsewhere)
    core = compose(
        loaded,
        layout,
        on_outputs,
        cache=CacheSettings(
            device_bytes=cache.device_bytes,
            host_bytes=cache.host_bytes,
            write_policy=WritePolicy(cache.write_policy),
            weigh_loads=cache.weigh_loads,
        ),
        disk=disk,
        checkpoint_disk=states,
        pin_folder=disk_path(data_dir),
        engine=_engine_settings(
            settings.engine, loaded.device, _other_arithmetics(data_dir, loaded)
        ),
        stream=stream,
        shares=shares,
    )
    return core if disk is None else replace(core, disk_view=disk.view)


def layout_of(loaded: LoadedModel, settings: Settings) -> BlockLayout:
    name = settings.model.kv_dtype
    kv_dtype = None if name == "auto" else name
    return loaded.layout(settings.cache.block_size or None, kv_dtype)


def _open_states(
    layout: BlockLayout, cache: CacheSection, data_dir: Path, shares: QuotaShares | None
) -> DiskTier | None:
    """The disk tier of the checkpoints of recurrent states, if the model has any."""
    if not (layout.states and cache.disk_bytes):
        return None
    return open_disk(
        states_path(data_dir),
        layout.checkpoint,
        int(CHECKPOINT_SHARE * cache.disk_bytes),
        settings=DiskSettings(
            idle_ttl_s=int(cache.idle_ttl) or None, reserve_bytes=cache.disk_reserve_bytes
        ),
        shares=shares,
    )


def _open_disk(
    layout: BlockLayout,
    cache: CacheSection,
    data_dir: Path,
    stream: EventStream,
    shares: QuotaShares | None,
    *,
    computes_elsewhere: bool,
) -> DiskTier | StackedTier | None:
    remote = remote_settings(cache)
    if not cache.disk_bytes:
        return None
    opened = remote.open() if remote is not None else None
    above = cache.device_bytes + cache.host_bytes
    behaviour = DiskSettings(
        computes_elsewhere=computes_elsewhere,
        moves=not keeps_copies(above, above + cache.disk_bytes),
        idle_ttl_s=int(cache.idle_ttl) or None,
        reserve_bytes=cache.disk_reserve_bytes,
    )
    num_shards = max(1, min(NEW_SHARDS, cache.disk_bytes >> 30))
    folder, states = disk_path(data_dir), states_path(data_dir)
    disk = open_disk(
        folder,
        layout,
        cache.disk_bytes,
        num_shards=num_shards,
        settings=behaviour,
        shares=shares,
        stream=stream,
    )
    shared = remote.shown_url if remote is not None else None
    note_elsewhere(folder, shared, [states] if layout.states else [])
    if not layout.states and read_meta(states) is not None:
        logger.info(f"removing the checkpoints of another model from {states}")
        remove_shards(states)
    if remote is None or opened is None:
        return disk
    return stack(disk, layout, opened, remote)


def _other_arithmetics(data_dir: Path, loaded: LoadedModel) -> tuple[bytes, ...]:
    """The arithmetics under which the directory has blocks that this process will not use."""
    # Which of both is its own is known once the forward is recorded.
    mine, moved = (loaded.arithmetic.digest(activated_by_row=by_row) for by_row in (True, False))
    scope = CacheScope(weights=loaded.weights_digest, arithmetic=mine)
    others = tuple(each for each in other_arithmetics(data_dir, scope) if each != moved)
    if others:
        logger.info(
            "the data directory has blocks of this model that another processor, device, version "
            "of torch or of cachesvc computed; they are not used, their misses are counted as "
            "%s, and they leave when room is needed",
            MissReason.ARITHMETIC,
        )
    return others


def _engine_settings(
    engine: EngineSection, device: str, others: tuple[bytes, ...]
) -> EngineSettings:
    num_tokens = step_tokens(engine, device)
    return EngineSettings(
        scheduler=SchedulerSettings(
            max_running=engine.max_running,
            step_tokens=num_tokens,
            mixed_step_tokens=max(1, num_tokens // 4),
            other_arithmetics=others,
        ),
        max_waiting=engine.max_waiting,
    )
