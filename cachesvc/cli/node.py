"""`cachesvc node`: this machine's tiers in a process that engines share."""

import json
import logging
import os
import select
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.format import size
from cachesvc.cli.options import data_dir_of, named
from cachesvc.cli.overrides import overridden, overriding
from cachesvc.cli.render import fail, note, print_json
from cachesvc.config.errors import WrongOption
from cachesvc.config.sources import load_settings

if TYPE_CHECKING:
    from tiers.node.client import NodeClient

logger = logging.getLogger(__name__)


def node(
    context: typer.Context,
    socket: Annotated[
        Path | None, typer.Option(help="Where to listen  [default: DATA_DIR/node.sock]")
    ] = None,
    host_cache: Annotated[
        str | None,
        overriding(
            "cache.host_bytes",
            "--host-cache",
            meaning="Host memory for the blocks of all models  [default: 2GiB]",
        ),
    ] = None,
    disk_cache_dir: Annotated[Path | None, typer.Option(help="Folder of the disk tier")] = None,
    disk_cache: Annotated[
        str | None,
        overriding(
            "cache.disk_bytes",
            "--disk-cache",
            meaning="Bytes on disk for the blocks of one model  [default: 8GiB]",
        ),
    ] = None,
    disk_reserve: Annotated[
        str | None, overriding("cache.disk_reserve_bytes", "--disk-reserve")
    ] = None,
    remote_url: Annotated[str | None, overriding("cache.remote_url", "--remote-url")] = None,
    remote_writes: Annotated[
        str | None, overriding("cache.remote_writes", "--remote-writes")
    ] = None,
    remote_key_file: Annotated[
        Path | None, overriding("cache.remote_key_file", "--remote-key-file")
    ] = None,
    quota: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=SIZE that others cannot evict: for a server's tenant, for group:NAME, or "
            "with * for each model and cache_salt; may be repeated"
        ),
    ] = None,
    events: Annotated[
        str | None,
        typer.Option(
            help="Publish block events for routers at this address, such as "
            "tcp://127.0.0.1:5557; or the keys of `events.zmq` as JSON"
        ),
    ] = None,
    metrics: Annotated[
        str, typer.Option(help="Serve Prometheus metrics at HOST:PORT, such as 127.0.0.1:9464")
    ] = "",
    stats: Annotated[
        bool, typer.Option("--stats", help="Print the counters of the running node as JSON")
    ] = False,
    stop: Annotated[
        bool, typer.Option("--stop", help="End the running node, once its disk has its blocks")
    ] = False,
) -> None:
    """Keep KV blocks for the engines of this machine, in shared memory and on disk.

    Engines connect over a Unix socket: vLLM through `cachesvc.vllm`. Blocks outlive an engine, so
    they are hits after its restart. Ctrl-C, SIGTERM or SIGHUP writes blocks that are only in memory
    to disk.

    What no option says comes from the environment, as `cachesvc config show` lists it.
    """
    path = (socket or data_dir_of(None) / "node.sock").expanduser()
    if stats:
        with _running(path, f"start one with cachesvc node --socket {path}") as client:
            print_json(client.stats())
        return
    if stop:
        _stop(path)
        return
    flags = overridden(context)
    flags["cache.quotas"] = named("--quota", quota or (), "NAME=SIZE, as in *=1GiB") or None
    flags["events.zmq"] = None if events is None else _events(events)
    _run(path, disk_cache_dir, flags, metrics)


def _run(path: Path, disk_dir: Path | None, flags: dict[str, Any], metrics: str) -> None:
    from cachesvc.operator.quotas import labelled
    from cachesvc.server.logs import configure
    from cachesvc.server.node import run_node
    from cachesvc.server.remote import remote_settings
    from tiers.node.settings import NodeSettings

    settings = load_settings(flags).settings
    cache, remote = settings.cache, remote_settings(settings.cache)
    if not cache.host_bytes:
        raise WrongOption("--host-cache 0: a node keeps its blocks in memory; write it like 4GiB")
    node = NodeSettings(
        socket=path,
        host_bytes=cache.host_bytes,
        disk_dir=disk_dir.expanduser().absolute() if disk_dir is not None else None,
        disk_bytes=cache.disk_bytes,
        disk_reserve_bytes=cache.disk_reserve_bytes,
        remote=remote,
        quotas=labelled(cache.quotas),
    )
    configure(settings.log)
    below = f"{size(node.disk_bytes)} in {node.disk_dir}" if node.disk_dir else "none"
    shared = f", shared through {remote.shown_url}" if remote is not None else ""
    ready = f"node ready at {path}: host memory {size(node.host_bytes)}, disk {below}{shared}"
    run_node(node, events=settings.events, metrics=metrics, on_ready=lambda: logger.info(ready))
    logger.info("node stopped")


def _events(text: str) -> Any:
    """An address, or a table such as `{"endpoint": ..., "replay_endpoint": ...}`."""
    try:
        return json.loads(text) if text.startswith("{") else text
    except ValueError as error:
        raise WrongOption(
            f"--events {text}: {error}; write an address, or a table like "
            f'{{"endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": "tcp://127.0.0.1:5558"}}'
        ) from None


def _stop(path: Path) -> None:
    """Asks the node to stop and waits: its socket disappears first, its process last."""
    with _running(path, "nothing to stop") as client:
        process = os.pidfd_open(client.peer)
    try:
        signal.pidfd_send_signal(process, signal.SIGTERM)
        select.select([process], [], [])
    finally:
        os.close(process)
    note("node stopped")


@contextmanager
def _running(path: Path, otherwise: str) -> "Iterator[NodeClient]":
    """A client of the node at this socket; ends the command where none answers."""
    from tiers.errors import NodeError
    from tiers.node.client import NodeClient

    try:
        with closing(NodeClient(path)) as client:
            client.open()
            yield client
    except NodeError as error:
        fail(f"{error}; {otherwise}")
