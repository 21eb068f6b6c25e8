"""The node of a server's vLLM engine: finds or starts it.

A node that the server starts is a process in its own session. It outlives the server, and the next
server finds its blocks in memory. `cachesvc node --stop` ends it.
"""

import contextlib
import logging
import subprocess
import sys
import time
from pathlib import Path

from cachesvc.config.sections import CacheSection, ZmqTable
from cachesvc.config.vllm import node_environment
from cachesvc.operator.quotas import labelled
from cachesvc.server.remote import remote_settings
from tiers.errors import ConfigurationError, NodeError
from tiers.node.counters import NodeCounters

logger = logging.getLogger(__name__)

START_S = 60.0
TIMEOUT_S = 5.0
_RUN = "import sys; from cachesvc.cli import main; sys.argv[0] = 'cachesvc'; main()"


def ensure_node(
    socket: Path, cache: CacheSection, disk_dir: Path, events: ZmqTable | None = None
) -> int:
    """Ensures that a node serves `socket`. One that it starts has the sizes, quotas and store of
    `cache`, and publishes block events as `events` say.

    Returns the bytes of its host memory: a running node has its own. Raises ConfigurationError, and
    ConfigError for a store that cannot be.
    """
    remote = remote_settings(cache)
    if (found := _answer_of(socket)) is not None:
        logger.info(f"using the running node at {socket} with its own sizes")
        if cache.quotas and found.quotas != labelled(cache.quotas):
            logger.warning(
                f"the node at {socket} keeps its own quotas, not those of cache.quotas; restart it "
                f"to change them: cachesvc node --stop --socket {socket}"
            )
        return found.host().capacity_bytes
    arguments = ["node", "--socket", str(socket), "--host-cache", str(cache.host_bytes)]
    if cache.disk_bytes:
        arguments += [f"--disk-cache-dir={disk_dir}", "--disk-cache", str(cache.disk_bytes)]
        if cache.disk_reserve_bytes is not None:
            arguments += ["--disk-reserve", str(cache.disk_reserve_bytes)]
    arguments += [f"--quota={name}={size}" for name, size in cache.quotas.items()]
    if events is not None:
        arguments += ["--events", events.model_dump_json()]
    log = socket.with_suffix(".log")
    socket.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as written:
        process = subprocess.Popen(
            [sys.executable, "-c", _RUN, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=written,
            env=node_environment(remote),
            start_new_session=True,
        )
    give_up = time.monotonic() + START_S
    while _answer_of(socket) is None:
        if process.poll() is not None or time.monotonic() > give_up:
            said = log.read_text(errors="replace").strip().splitlines()[-1:]
            raise ConfigurationError(
                f"the node at {socket} did not start: {' '.join(said) or 'it says nothing'}; "
                f"see {log}, or start it yourself: cachesvc {' '.join(arguments)}"
            )
        time.sleep(0.05)
    logger.info(f"a node was started at {socket} (process {process.pid}); it outlives this server")
    return cache.host_bytes


def _answer_of(socket: Path) -> NodeCounters | None:
    from tiers.node.client import NodeClient  # torch, which no relay needs

    try:
        with contextlib.closing(NodeClient(socket, timeout_s=TIMEOUT_S)) as client:
            client.open()
            return NodeCounters(client.stats())
    except NodeError:
        return None
