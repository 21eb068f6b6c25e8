"""Runs `cachesvc node`: the node, its published events and its Prometheus endpoint."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from cachesvc.config.errors import ConfigError
from cachesvc.config.sections import EventsSection
from cachesvc.observability.kv_events import published
from cachesvc.observability.table import MetricSample, node_samples
from cachesvc.server.memory import warn_of_limit
from cachesvc.server.supervisor import stop_signals
from engine.operators.library import BUILT, Operators
from tiers.disk.format.planes import use_library
from tiers.errors import NodeError
from tiers.node.client import NodeClient
from tiers.node.counters import NodeCounters
from tiers.node.node import NodeServer
from tiers.node.settings import NodeSettings

SCRAPE_S = 5.0


def run_node(
    settings: NodeSettings, *, events: EventsSection, metrics: str, on_ready: Callable[[], None]
) -> None:
    """Serves until one of `stop_signals`. Raises ConfigError, and what `NodeServer.open` does."""
    serving = NodeServer(settings)
    serving.open()
    warn_of_limit({"--host-cache": settings.host_bytes})
    with closing(serving), published(events, serving.stream), _expanded_by_library(settings):
        if metrics:
            _answer_scrapes(metrics, settings.socket)
        for number in stop_signals():
            signal.signal(number, lambda *_: serving.stop())
        on_ready()
        serving.run()


@contextmanager
def _expanded_by_library(settings: NodeSettings) -> Iterator[None]:
    """Compiled functions expand the disk's records, from when there are any; the log says why if
    there are none. They are kept on the disk: a socket is often in /run, where many systems
    let nothing be executed."""
    if settings.disk_dir is None:
        yield
        return
    operators = Operators(settings.disk_dir / "models", BUILT)

    def use() -> None:
        if operators.load(patience_s=None) and operators.loaded is not None:
            use_library(operators.loaded)

    thread = threading.Thread(target=use, name="cachesvc-compiled")
    thread.start()
    try:
        yield
    finally:
        operators.close()
        thread.join()


def _answer_scrapes(address: str, socket: Path) -> None:
    """Serves metrics. Raises ConfigError for an invalid or foreign address."""
    from cachesvc.observability.metrics import serve_samples

    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--metrics {address!r} is not an address; write it like 127.0.0.1:9464")
    try:
        serve_samples(host.strip("[]"), int(port), lambda: _read(socket))
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on --metrics {address}: {error}") from None


def _read(socket: Path) -> Iterator[MetricSample]:
    """The counters, requested like any client does, so that the node's own thread reads them."""
    try:
        with closing(NodeClient(socket, timeout_s=SCRAPE_S)) as client:
            client.open()
            counters = NodeCounters(client.stats())
    except NodeError:
        return iter(())
    return node_samples(counters)
