"""The node that a server's vLLM engine uses: found running, or started, and looked at.

A node that the server starts is a process of its own, in a session of its own: it outlives the
server, and the next one finds its blocks in memory. `cachesvc node --stop` ends it.
"""

import contextlib
import logging
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cachesvc.config.vllm import node_environment
from tiers.errors import ConfigurationError, MissReason, NodeError
from tiers.node.client import NodeClient
from tiers.remote.settings import RemoteSettings
from tiers.tier import TierName, TierStats

logger = logging.getLogger(__name__)

START_S = 60.0
LOOK_S = 1.0
_TIMEOUT_S = 5.0
_RUN = "import sys; from cachesvc.cli import main; sys.argv[0] = 'cachesvc'; main()"


def ensure_node(
    socket: Path,
    *,
    host_bytes: int,
    disk_dirs: Sequence[Path] = (),
    disk_bytes: int = 0,
    remote: RemoteSettings | None = None,
) -> bool:
    """See that a node serves `socket`; whether it had to be started. Raises ConfigurationError."""
    if _answers(socket):
        logger.info(f"the node at {socket} is used as it runs; its sizes are its own")
        return False
    log = socket.with_suffix(".log")
    below = []
    if disk_dirs and disk_bytes:
        below = [f"--disk-cache-dir={folder}" for folder in disk_dirs]
        below += ["--disk-cache", str(disk_bytes)]
    arguments = ["node", "--socket", str(socket), "--host-cache", str(host_bytes), *below]
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
    while not _answers(socket):
        if process.poll() is not None or time.monotonic() > give_up:
            said = log.read_text(errors="replace").strip().splitlines()[-1:]
            raise ConfigurationError(
                f"the node at {socket} did not start: {' '.join(said) or 'it says nothing'}; "
                f"see {log}, or start it yourself: cachesvc {' '.join(arguments)}"
            )
        time.sleep(0.05)
    logger.info(f"a node was started at {socket} (process {process.pid}); it outlives this server")
    return True


def _answers(socket: Path) -> bool:
    try:
        with contextlib.closing(NodeClient(socket, timeout_s=_TIMEOUT_S)) as client:
            client.open()
            client.stats()
    except NodeError:
        return False
    return True


class NodeWatch:
    """The node's counters as tiers, looked at every second. A node that is away shows nothing."""

    def __init__(self, socket: Path) -> None:
        self._client = NodeClient(socket, timeout_s=_TIMEOUT_S)
        self._stats: dict[str, Any] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="cachesvc-node-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def look(self) -> None:
        """Read the counters now."""
        try:
            if not self._client.is_connected:
                self._client.open()
            self._stats = self._client.stats()
        except NodeError as error:
            logger.debug(f"the node's counters cannot be read: {error}")
            self._stats = {}
            self._client.close()

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._client.close()

    @property
    def pools(self) -> Sequence[dict[str, Any]]:
        pools: Sequence[dict[str, Any]] = self._stats.get("pools", ())
        return pools

    @property
    def collisions(self) -> int:
        return self.total("collisions")

    @property
    def is_shared(self) -> bool:
        """Whether a store that machines share is beneath the node."""
        return any("remote" in pool for pool in self.pools)

    def total(self, counter: str) -> int:
        """A counter over all layouts."""
        return sum(pool[counter] for pool in self.pools)

    def host(self) -> TierStats:
        """The node's memory: all engines' blocks, since they share it."""
        used = self._stats.get("used_bytes", 0)
        return TierStats(
            name=TierName.HOST,
            num_blocks=sum(pool["num_blocks"] for pool in self.pools),
            used_bytes=used,
            logical_bytes=used,
            capacity_bytes=self._stats.get("capacity_bytes", 0),
            hits=sum(pool["host_hits"] for pool in self.pools),
            stored=sum(pool["stored"] for pool in self.pools),
            evicted=sum(pool["evicted"] for pool in self.pools),
        )

    def disk(self) -> TierStats | None:
        disks = [pool["disk"] for pool in self.pools if "disk" in pool]
        if not disks:
            return None
        total = {name: sum(disk[name] for disk in disks) for name in _DISK_SUMS}
        hits = sum(pool["disk_hits"] for pool in self.pools)
        return TierStats(name=TierName.DISK, hits=hits, faults=_faults(disks), **total)

    def remote(self) -> TierStats | None:
        """What the node did with the store that machines share."""
        tiers = [pool["remote"] for pool in self.pools if "remote" in pool]
        if not tiers:
            return None
        return TierStats(
            name=TierName.REMOTE,
            hits=sum(pool["remote_hits"] for pool in self.pools),
            stored=sum(tier["stored"] for tier in tiers),
            faults=_faults(tiers),
        )

    def _look(self) -> None:
        while not self._ended.wait(LOOK_S):
            self.look()


_DISK_SUMS = ("num_blocks", "used_bytes", "capacity_bytes", "stored", "evicted")


def _faults(tiers: Sequence[dict[str, Any]]) -> dict[MissReason, int]:
    total: Counter[MissReason] = Counter()
    for tier in tiers:
        total.update({MissReason(reason): count for reason, count in tier["faults"].items()})
    return dict(total)
