"""Builds the compute half of a server whose engine runs elsewhere: at a URL, or as a child.

The counterpart of `cachesvc.server.compute`. A vLLM that is our child has our connector and a node;
everything else is the same.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cachesvc.config.errors import ConfigError
from cachesvc.config.places import disk_path, models_path
from cachesvc.config.settings import Settings
from cachesvc.model_files import UnsupportedKv
from cachesvc.server.backend import CoreElsewhere, NoBlocks, cache_stats
from cachesvc.server.memory import full_caches, warn_of_limit
from cachesvc.server.vllm.arguments import asked_context, is_cpu, rank_of, serve_flags
from cachesvc.server.vllm.child import VllmChild
from cachesvc.server.vllm.node import ensure_node
from cachesvc.server.vllm.node_operations import NodeOperations
from cachesvc.vllm.identity import adapter_digest
from cachesvc.vllm.reports import Ready, Reports
from engine.bounds import check_params
from engine.errors import AdapterError
from engine.grammar.compiler import compiler_for
from engine.models.arithmetic import processor_name
from engine.models.describe import describe_folder
from engine.openmp import run_apart
from engine.promise import Equal, Promise
from engine.remote.client import EngineHttp
from engine.remote.engine import RemoteEngine
from engine.remote.find import Meant, find, find_each
from engine.remote.upstreams import Remote, Upstream
from engine.request import StepOutput
from engine.settings import EngineSettings
from tiers.blocks.keys import CacheScope
from tiers.node.messages import engine_layout

logger = logging.getLogger(__name__)

NODE_SOCKET = "node.sock"
PLAIN = Promise(Equal.NONE, "the engine chooses kernels by the number of rows")
BATCH_INVARIANT = Promise(Equal.NONE, "vLLM's batch-invariant mode has not been tried with hits")
_RESET = "/reset_prefix_cache?reset_running_requests=true"


def build(
    settings: Settings,
    on_outputs: Callable[[Sequence[StepOutput]], None],
    progress: Callable[[str, float], None] | None = None,
) -> CoreElsewhere:
    """Finds the model's text side here, starts vLLM over its node unless the engine has a URL, and
    asks the engine what it is. Raises ConfigError, ModelError and the node's errors."""
    about, urls = settings.engine, settings.engine.urls
    key = about.key.get_secret_value() if urls else ""  # a child of ours has none
    promise = _promise(settings)
    logger.info(promise.text)
    spoken = describe_folder(
        settings.model.name, models_path(settings.server.data_dir), progress, text_alone=bool(urls)
    )
    adapters = _digests(settings.model.adapters)
    child, node, reports = None, None, None
    with ExitStack() as opening:
        if not urls:
            child, node, reports = _started(settings, spoken.folder, opening)
            urls = [f"unix:{child.socket}"]
        meant = Meant(
            names=(settings.model.name, str(spoken.folder)),
            tokenizer=spoken.tokenizer,
            adapters=tuple(adapters),
            max_tokens=asked_context(settings) if child is None else None,
            tagged=reports is not None,
        )
        upstreams = _asked(urls, meant, key, about.max_time)
        found = next(each.remote for each in upstreams if each.is_found)
        bounds = EngineSettings(
            max_waiting=about.max_waiting,
            eos_token_ids=spoken.eos_token_ids,
            adapters=adapters,
            check_params=partial(check_params, vocab_size=spoken.vocab_size),
        )
        engine = RemoteEngine(upstreams, on_outputs, bounds, reports=reports)
        engine.start()
        opening.callback(engine.close)
        layout = engine_layout(1, 1, found.block_size, "float32")
        scope = CacheScope(weights=str(spoken.folder).encode(), tokenizer=spoken.tokenizer.digest)
        facts: Mapping[str, str] = {}
        operations: NodeOperations | NoBlocks = NoBlocks()
        if node is not None and (ready := _ready(reports)) is not None:
            layout, scope = ready.groups[0].layout, ready.scope
            facts = _facts(engine, found, layout.dtype)
            operations = NodeOperations(
                node,
                ready.groups,
                ready.num_ranks,
                forget=partial(_forget, engine),
                in_flight=engine.in_flight,
            )
            opening.callback(operations.close)
            operations.start()
        engine.use(
            operations,
            lambda: cache_stats(layout, operations.counters, engine.num_blocks, engine.kv_usage),
        )
        if child is not None:
            child.on_end(engine.fail)
        grammars = compiler_for(spoken)
        opening.callback(grammars.close)
        opening.callback(engine.close)  # before the node's part, which serves running requests
        return CoreElsewhere(
            loaded=spoken,
            layout=layout,
            scope=scope,
            operations=operations,
            engine=engine,
            grammars=grammars,
            promise=promise,
            opened=opening.pop_all(),
            adapters=adapters,
            facts=facts,
        )


def _asked(urls: Sequence[str], meant: Meant, key: str, max_time_s: float) -> list[Upstream]:
    """The engines at the URLs, all with one context length."""

    async def find_one(url: str) -> Remote:
        nonlocal meant
        remote = await find(url, meant, key)
        meant = replace(meant, max_tokens=remote.max_tokens)
        return remote

    found = run_apart(lambda: asyncio.run(find_each(urls, find_one)))
    return [
        Upstream(
            EngineHttp(url, key, max_time_s),
            one,
            find=partial(find_one, url),
            is_found=one is not None,
        )
        for url, one in zip(urls, found, strict=True)
    ]


def _started(
    settings: Settings, folder: Path, opening: ExitStack
) -> tuple[VllmChild, Path | None, Reports | None]:
    """A vLLM of ours, over its node unless that is turned off. Its connector tells the reports."""
    data_dir = settings.server.data_dir
    node, reports = _node(settings), None
    if node is not None:
        reports = Reports(data_dir / "vllm-reports.sock")
        opening.callback(reports.close)
    connector: dict[str, Any] | None = None
    if reports is not None:
        weighs = settings.cache.weigh_loads
        connector = {"node": str(node), "reports": str(reports.path), "weigh_loads": weighs}
    flags = serve_flags(settings, folder, connector)
    child = VllmChild(data_dir / "vllm.sock", flags, exact=settings.model.exact == "always")
    opening.callback(child.close)
    child.start()
    return child, node, reports


def _digests(adapters: Mapping[str, str]) -> dict[str, bytes]:
    """Of the adapters in these folders, by name. Raises AdapterError for another folder."""
    found: dict[str, bytes] = {}
    for name, source in adapters.items():
        folder = str(Path(source).expanduser())
        try:
            rank_of(folder)
            found[name] = adapter_digest(folder)
        except (OSError, ValueError, KeyError, TypeError, UnsupportedKv) as error:
            raise AdapterError(
                f"adapter {name}: {folder} does not hold a LoRA adapter for vLLM: {error}"
            ) from None
    return found


def _promise(settings: Settings) -> Promise:
    if settings.model.exact != "always":
        return PLAIN
    if is_cpu():
        raise ConfigError(
            "model.exact is always, but vLLM has no batch-invariant kernels for a CPU. Set it to "
            "auto, or use --engine embedded, which can promise equal bits there"
        )
    return BATCH_INVARIANT


def _node(settings: Settings) -> Path | None:
    """The socket of the engine's node; None to run without one. Says if its memory and vLLM's own
    cache will not fit this machine."""
    cache, data_dir = settings.cache, settings.server.data_dir
    socket: Path | None = None
    if cache.host_bytes:
        disk = disk_path(data_dir) / "node"
        socket = (settings.engine.node or data_dir / NODE_SOCKET).expanduser()
        host_bytes = ensure_node(socket, cache, disk, settings.events.publisher)
    elif cache.disk_bytes:
        logger.warning("cache.host_bytes is 0, so no node runs, and no block is kept on disk")
    node_bytes = host_bytes if socket else 0
    warn_of_limit(full_caches(cache, on_gpu=not is_cpu(), node_bytes=node_bytes))
    return socket


def _ready(reports: Reports | None) -> Ready | None:
    """What the connector says of the engine's blocks."""
    if reports is None:
        return None
    reports.take()
    if reports.engine is None:
        logger.warning("the connector caches nothing below vLLM; the log above says why")
    return reports.engine


def _facts(engine: RemoteEngine, found: Remote, kv_dtype: str) -> Mapping[str, str]:
    """As those of the embedded engine."""
    _, about = engine.ask("GET", "/server_info?config_format=json").result()
    config = about["vllm_config"]
    device = str(config["device_config"]["device"])
    return {
        "engine": "vllm",
        "device": device,
        "dtype": str(config["model_config"]["dtype"]).removeprefix("torch."),
        "kv_dtype": kv_dtype,
        "processor": processor_name(device),
        "vllm": found.version,
        "torch": version("torch"),
    }


def _forget(engine: RemoteEngine) -> bool:
    """Makes vLLM empty its prefix cache. Running requests recompute their prefixes."""
    _, answer = engine.ask("POST", _RESET).result()
    return bool(answer["success"])
