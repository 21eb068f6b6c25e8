"""`cachesvc node`: this machine's tiers in a process that engines share."""

import logging
import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from api.format import plain, size
from cachesvc.cli.options import data_dir_of
from cachesvc.cli.render import fail, note, print_json
from cachesvc.config.errors import WrongOption
from cachesvc.config.quantities import parse_size
from tiers.remote.settings import RemoteWrites

if TYPE_CHECKING:
    from cachesvc.config.sections import EventsSection
    from tiers.node.client import NodeClient
    from tiers.node.settings import NodeSettings

logger = logging.getLogger(__name__)


RemoteUrl = Annotated[
    str,
    typer.Option(
        envvar="CACHESVC_CACHE__REMOTE_URL",
        help="Tier shared with other machines' nodes: redis://, redis+cluster:// or s3://",
    ),
]
RemoteWrite = Annotated[
    RemoteWrites,
    typer.Option(
        envvar="CACHESVC_CACHE__REMOTE_WRITES",
        help="Blocks to send there: reused (hit twice or pinned) or all",
    ),
]
RemoteKeyFile = Annotated[
    Path | None,
    typer.Option(
        envvar="CACHESVC_CACHE__REMOTE_KEY_FILE",
        help="File with a key of 64 hex digits, to encrypt these blocks",
    ),
]


def node(
    socket: Annotated[
        Path | None, typer.Option(help="Where to listen  [default: DATA_DIR/node.sock]")
    ] = None,
    host_cache: Annotated[
        str, typer.Option(help="Host memory for the blocks of all models")
    ] = "2GiB",
    disk_cache_dir: Annotated[Path | None, typer.Option(help="Folder of the disk tier")] = None,
    disk_cache: Annotated[
        str, typer.Option(help="Bytes on disk for the blocks of one model")
    ] = "8GiB",
    disk_reserve: Annotated[
        str,
        typer.Option(
            help="Bytes of its file system that the disk leaves to others  [default: 5 %, but 1 to "
            "16 GiB, and a quarter of a small one]",
            show_default=False,
        ),
    ] = "",
    remote_url: RemoteUrl = "",
    remote_writes: RemoteWrite = RemoteWrites.REUSED,
    remote_key_file: RemoteKeyFile = None,
    quota: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=SIZE that others cannot evict: for a server's tenant, for group:NAME, or "
            "with * for each model and cache_salt; may be repeated"
        ),
    ] = None,
    events: Annotated[
        str,
        typer.Option(
            help="Publish block events for routers at this address, such as "
            "tcp://127.0.0.1:5557; or the keys of `events.zmq` as JSON"
        ),
    ] = "",
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
    """
    path = (socket or data_dir_of(None) / "node.sock").expanduser()
    if stats:
        with _running(path, f"start one with cachesvc node --socket {path}") as client:
            print_json(client.stats())
        return
    if stop:
        _stop(path)
        return
    from cachesvc.config.sections import with_its_unit
    from cachesvc.operator.quotas import labelled
    from tiers.node.settings import NodeSettings
    from tiers.remote.settings import RemoteSettings

    settings = NodeSettings(
        socket=path,
        host_bytes=_bytes("--host-cache", host_cache, with_its_unit),
        disk_dir=disk_cache_dir.expanduser().absolute() if disk_cache_dir is not None else None,
        disk_bytes=_bytes("--disk-cache", disk_cache, with_its_unit),
        disk_reserve_bytes=_bytes("--disk-reserve", disk_reserve) if disk_reserve else None,
        remote=RemoteSettings(remote_url, remote_writes, remote_key_file) if remote_url else None,
        quotas=labelled(dict(map(_quota, quota or ()))),
    )
    if not settings.host_bytes:
        raise WrongOption("--host-cache 0: a node keeps its blocks in memory; write it like 4GiB")
    _run(settings, _events(events), metrics)


def _run(settings: "NodeSettings", events: "EventsSection", metrics: str) -> None:
    from cachesvc.config.sources import load_settings
    from cachesvc.server.logs import configure
    from cachesvc.server.node import run_node

    configure(load_settings().settings.log)
    below = f"{size(settings.disk_bytes)} in {settings.disk_dir}" if settings.disk_dir else "none"
    shared = f", shared through {settings.remote.shown_url}" if settings.remote is not None else ""
    ready = (
        f"node ready at {settings.socket}: host memory {size(settings.host_bytes)}, "
        f"disk {below}{shared}"
    )
    run_node(settings, events=events, metrics=metrics, on_ready=lambda: logger.info(ready))
    logger.info("node stopped")


def _quota(text: str) -> tuple[str, int]:
    name, sign, quota = text.partition("=")
    if not name or not sign:
        raise WrongOption(f"--quota {text!r} is not a quota; write it like acme=10GiB or *=1GiB")
    return name, _bytes("--quota", quota)


def _events(text: str) -> "EventsSection":
    """An address, or a table such as `{"endpoint": ..., "replay_endpoint": ...}`."""
    from pydantic import ValidationError

    from cachesvc.config.sections import EventsSection, ZmqTable

    if not text.startswith("{"):
        return EventsSection(zmq=text)
    try:
        return EventsSection(zmq=ZmqTable.model_validate_json(text))
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, e['loc']))} {plain(e['msg'])}" for e in error.errors()
        )
        raise WrongOption(
            f"--events {text}: {wrong.strip()}; write an address, or a table like "
            f'{{"endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": "tcp://127.0.0.1:5558"}}'
        ) from None


def _bytes(option: str, text: str, check: Callable[[int], int] = int) -> int:
    try:
        return check(parse_size(text))
    except ValueError as error:
        raise WrongOption(f"{option}: {error}") from None


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
