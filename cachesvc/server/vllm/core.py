"""Builds the compute half of a server with vLLM from settings: model, node, AsyncLLM.

The counterpart of `cachesvc.server.compute`. Imports vLLM when `build` runs.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cachesvc.config.errors import ConfigError
from cachesvc.config.places import disk_path, models_path
from cachesvc.config.settings import Settings
from cachesvc.config.vllm import prepare_vllm_environment
from cachesvc.server.memory_limit import of_vllm, warn_of_limit
from cachesvc.server.remote import remote_settings
from cachesvc.server.vllm.adapters import VllmAdapter, max_rank, read_adapters
from cachesvc.server.vllm.arguments import engine_arguments
from cachesvc.server.vllm.engine import VllmEngine
from cachesvc.server.vllm.generate import VllmSettings
from cachesvc.server.vllm.grammars import CheckedGrammars, guidance
from cachesvc.server.vllm.node import NodeWatch, ensure_node
from cachesvc.server.vllm.node_operations import NodeOperations
from cachesvc.server.vllm.relay import NodeRelay
from cachesvc.server.vllm.tiers import OperationsElsewhere, cache_stats
from cachesvc.vllm.reports import Reports
from engine.bounds import check_params
from engine.errors import ModelError
from engine.grammar.compiler import compiler_for
from engine.models.describe import Spoken, describe_folder
from engine.promise import Equal, Promise
from engine.request import StepOutput
from engine.text.detokenizer import IncrementalDetokenizer
from tiers.blocks.keys import CacheScope, PrefixKey
from tiers.blocks.layout import BlockLayout
from tiers.node.messages import engine_layout
from tiers.telemetry.events import EventStream

logger = logging.getLogger(__name__)

NODE_SOCKET = "node.sock"
PLAIN = Promise(Equal.NONE, "vLLM chooses kernels by the number of rows")
BATCH_INVARIANT = Promise(Equal.NONE, "vLLM's batch-invariant mode has not been tried with hits")


@dataclass(frozen=True, slots=True)
class Adapters:
    """LoRA adapters by name, with the content digests used in scopes."""

    digests: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class VllmModel:
    """The part of the served model that the wire needs."""

    name: str
    spoken: Spoken
    max_context: int
    adapters: Adapters

    @property
    def tokenizer(self) -> Any:
        return self.spoken.tokenizer

    @property
    def vocab_size(self) -> int:
        return self.spoken.vocab_size

    @property
    def images(self) -> None:
        """None: even if the model reads images, it gets only tokens here."""
        return None


@dataclass(frozen=True, slots=True)
class VllmCore:
    """Takes the place of `engine.composition.Core`."""

    loaded: VllmModel
    layout: BlockLayout
    scope: CacheScope
    operations: OperationsElsewhere
    engine: VllmEngine
    grammars: CheckedGrammars
    node: NodeWatch | None
    node_operations: NodeOperations | None
    relay: NodeRelay | None
    promise: Promise = PLAIN
    disk_view: None = None  # the node has the disk

    @property
    def is_shared(self) -> bool:
        """Whether other machines can load what is published here."""
        return self.node is not None and self.node.counters.is_shared

    @property
    def facts(self) -> Mapping[str, str]:
        """As those of the embedded engine. Empty without a connector, which reads the contents of
        the model."""
        if self.node_operations is None:
            return {}
        import vllm

        from engine.models.arithmetic import processor_name

        config = self.engine.vllm_config
        return {
            "engine": "vllm",
            "device": str(config.device_config.device_type),
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "kv_dtype": self.layout.dtype,
            "processor": processor_name(str(config.device_config.device_type)),
            "vllm": vllm.__version__,
            "torch": version("torch"),
        }

    def start(self, warm_up_tokens: int = 0) -> None:
        """Does nothing: vLLM warms up when it is opened."""
        if self.node is not None:
            self.node.start()
        if self.relay is not None:
            self.relay.start()

    def tell_owners(self, owners: Mapping[PrefixKey, str]) -> None:
        """Passes the owners to the node for quotas, now and after its next start."""
        if self.node_operations is not None and self.node is not None:
            self.node_operations.owners = owners
            self.node.join_again()

    def close(self, drain_s: float = 0.0) -> int:
        """Stops vLLM. The node keeps running with the blocks."""
        self.engine.close(drain_s)
        self.grammars.close()
        if self.node_operations is not None:
            self.node_operations.close()
        if self.relay is not None:
            self.relay.close()
        if self.node is not None:
            self.node.close()
        return 0

    def detokenizer(
        self, stop: Sequence[str], *, shown: Sequence[str] = ()
    ) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self.loaded.tokenizer, stop, shown=shown)


def build(
    settings: Settings,
    on_outputs: Callable[[Sequence[StepOutput]], None],
    stream: EventStream,
    progress: Callable[[str, float], None] | None = None,
) -> VllmCore:
    """Finds the model, ensures that a node runs, and starts vLLM over it.

    Raises ConfigError, ModelError and the node's errors.
    """
    exact = settings.model.exact == "always"
    prepare_vllm_environment(exact=exact)
    _import()
    if exact and _is_cpu():
        raise ConfigError(
            "model.exact is always, but vLLM has no batch-invariant kernels for a CPU. Set it to "
            "auto, or use --engine embedded, which can promise equal bits there"
        )
    promise = BATCH_INVARIANT if exact else PLAIN
    logger.info(promise.text)
    data_dir = settings.server.data_dir
    spoken = describe_folder(settings.model.name, models_path(data_dir), progress)
    adapters = read_adapters(settings.model.adapters)
    socket = _node(settings)
    reports = Reports(data_dir / "vllm-reports.sock") if socket is not None else None
    ours = _ours(settings, spoken, adapters)
    if socket is not None and reports is not None:
        ours["kv_transfer_config"] = _transfer(socket, reports)
    arguments = engine_arguments(settings.engine.vllm, ours)

    def open_llm(stat_logger: Any) -> Any:
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(arguments, stat_loggers=[stat_logger])

    engine = VllmEngine(
        open_llm,
        VllmSettings(
            max_waiting=settings.engine.max_waiting,
            eos_token_ids=spoken.eos_token_ids,
            check_params=partial(check_params, vocab_size=spoken.vocab_size),
            adapters=adapters,
        ),
        on_outputs,
        reports=reports,
    )
    engine.open()
    layout, scope = _blocks(engine, reports, spoken)
    node = node_operations = relay = None
    if socket is not None and reports is not None:
        relay = NodeRelay(socket, stream)
        if reports.engine is not None:
            node_operations = NodeOperations(
                socket,
                reports.engine.groups,
                reports.engine.num_ranks,
                forget=engine.forget_prefixes,
                in_flight=engine.in_flight,
            )
            node_operations.pins.pins()  # the first request makes the node open a layout's tiers
        introduce = [node_operations.introduce] if node_operations is not None else []
        node = NodeWatch(socket, *introduce)
        node.look()
    num_blocks = int(engine.vllm_config.cache_config.num_gpu_blocks or 0)
    operations = OperationsElsewhere(layout, node_operations, num_blocks)
    engine.use(operations, partial(cache_stats, layout, stream, engine.counts, node, num_blocks))
    digests = {name: adapter.digest for name, adapter in adapters.items()}
    return VllmCore(
        loaded=VllmModel(settings.model.name, spoken, engine.max_tokens, Adapters(digests)),
        layout=layout,
        scope=scope,
        operations=operations,
        engine=engine,
        grammars=CheckedGrammars(compiler_for(spoken)),
        node=node,
        node_operations=node_operations,
        relay=relay,
        promise=promise,
    )


def _import() -> None:
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"vLLM cannot be imported in this environment: {error}; docs/vllm.md says which build "
            "is for what machine"
        ) from None


def _node(settings: Settings) -> Path | None:
    """The socket of the engine's node; None to run without one. Says if its memory and vLLM's own
    cache will not fit this machine."""
    cache, data_dir = settings.cache, settings.server.data_dir
    remote = remote_settings(cache)
    if not cache.host_bytes:
        if cache.disk_bytes:
            logger.warning("cache.host_bytes is 0, so no node runs, and no block is kept on disk")
        warn_of_limit(of_vllm(cache, 0, on_gpu=not _is_cpu()))
        return None
    socket = settings.engine.node or data_dir / NODE_SOCKET
    host_bytes = ensure_node(
        socket.expanduser(),
        host_bytes=cache.host_bytes,
        disk_dir=disk_path(data_dir) / "node",
        disk_bytes=cache.disk_bytes,
        disk_reserve_bytes=cache.disk_reserve_bytes,
        remote=remote,
        quotas=cache.quotas,
    )
    warn_of_limit(of_vllm(cache, host_bytes, on_gpu=not _is_cpu()))
    return socket.expanduser()


def _ours(
    settings: Settings, spoken: Spoken, adapters: Mapping[str, VllmAdapter]
) -> dict[str, Any]:
    """The arguments that the server sets. All others are up to vLLM or its user."""
    model, given = settings.model, {name.replace("_", "-") for name in settings.engine.vllm}
    ours: dict[str, Any] = {
        "model": str(spoken.folder),
        "served_model_name": [model.name],
        "enable_prefix_caching": True,
        "structured_outputs_config": guidance(),
    }
    if model.dtype != "auto" or _is_cpu():
        ours["dtype"] = "float32" if model.dtype == "auto" else model.dtype
    if _is_cpu() and "kv-cache-memory-bytes" not in given:
        ours["kv_cache_memory_bytes"] = settings.cache.device_bytes
    if "scheduling-policy" not in given:
        ours["scheduling_policy"] = "priority"
    if "max-num-seqs" not in given:
        ours["max_num_seqs"] = settings.engine.max_running
    if adapters:
        ours["enable_lora"] = True
        if "max-loras" not in given:
            ours["max_loras"] = min(8, len(adapters))
        if "max-lora-rank" not in given:
            ours["max_lora_rank"] = max_rank(adapters)
    return ours


def _transfer(node: Path, reports: Reports) -> Any:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector="CachesvcConnector",
        kv_connector_module_path="cachesvc.vllm",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"node": str(node), "reports": str(reports.path)},
    )


def _is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _blocks(
    engine: VllmEngine, reports: Reports | None, spoken: Spoken
) -> tuple[BlockLayout, CacheScope]:
    """The layout and scope of vLLM's blocks; placeholders if no connector reports them."""
    if reports is not None and reports.engine is not None:
        return reports.engine.groups[0].layout, reports.engine.scope
    if reports is not None:
        logger.warning("the connector caches nothing below vLLM; the log above says why")
    if not engine.block_size:
        raise ModelError("vLLM does not say how many tokens a block has")
    scope = CacheScope(weights=str(spoken.folder).encode(), tokenizer=spoken.tokenizer.digest)
    return engine_layout(1, 1, engine.block_size, "float32"), scope
