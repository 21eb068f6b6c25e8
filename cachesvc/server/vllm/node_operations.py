"""Operations on blocks in a node, for a server with vLLM.

The node carries them out. Slow calls have their own threads, each with a connection. A purge first
closes its scopes in the node, then makes vLLM empty its own cache. The scopes stay closed until
every running request has ended and stored its blocks.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from cachesvc.operator.purge import total
from cachesvc.server.vllm.node import TIMEOUT_S
from cachesvc.server.vllm.node_pins import NodePins
from cachesvc.server.vllm.node_prefixes import KvParts, KvPrefix, Nodes
from cachesvc.vllm.groups import KvGroup
from engine.errors import RemoteFault
from tiers.blocks.chain import Chain
from tiers.blocks.keys import PrefixKey
from tiers.errors import NodeError, PurgeFailed
from tiers.node.client import NodeClient
from tiers.node.counters import NodeCounters
from tiers.operations.below import done
from tiers.tier import Purged, Removed, TierName

logger = logging.getLogger(__name__)

SLOW_S = 120.0  # for answers that need the disk
FORGET_S = 30.0  # how long to try to empty vLLM's own cache
STORE_S = 10.0  # time to store a request's blocks after its end
PUBLISH_S = 8.0
LOOK_S = 0.02
WATCH_S = 1.0  # between two readings of the node's counters
T = TypeVar("T")


class NodeOperations(NodePins):
    """The operations on blocks in the node at `socket`, below the engine that has these groups.

    `forget` empties vLLM's own cache. `in_flight` returns the running requests. `start` begins to
    read the node's counters.
    """

    def __init__(
        self,
        socket: Path,
        groups: Sequence[KvGroup],
        num_ranks: int,
        *,
        forget: Callable[[], bool],
        in_flight: Callable[[], frozenset[str]],
    ) -> None:
        super().__init__(socket, KvParts(tuple(groups), num_ranks))
        self._socket = socket
        self._forget = forget
        self._in_flight = in_flight
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="cachesvc-node-operate")
        self._ended = threading.Event()
        self._watching = threading.Thread(
            target=self._watch, name="cachesvc-node-watch", daemon=True
        )
        self._client = NodeClient(socket, timeout_s=TIMEOUT_S)  # that reads the counters
        self._lock = threading.Lock()  # of it
        self._owners: Mapping[PrefixKey, str] = {}
        self.counters = NodeCounters()  # as they were read last; none while it does not answer

    def start(self) -> None:
        self.pins()  # makes the node open the layouts' tiers
        self._look()
        self._watching.start()

    def tell_owners(self, owners: Mapping[PrefixKey, str]) -> None:
        """Passes the owners of scopes to the node for quotas, now and after its next start."""
        with self._lock:
            self._owners = owners
            self._client.close()
        self._look()

    def _look(self) -> None:
        """Reads the counters now. A node that is joined, which may be a new one, learns owners."""
        with self._lock:
            try:
                if not self._client.is_connected:
                    self._client.open()
                    roots = {root: self._roots(root) for root in self._owners}
                    owners = {k: self._owners[root] for root, keys in roots.items() for k in keys}
                    if owners:
                        self._client.know(owners)
                self.counters = NodeCounters(self._client.stats())
            except NodeError as error:
                logger.debug(f"the node's counters cannot be read: {error}")
                self.counters = NodeCounters()
                self._client.close()

    def _watch(self) -> None:
        while not self._ended.wait(WATCH_S):
            self._look()

    def _roots(self, root: PrefixKey) -> list[PrefixKey]:
        """The roots of every group's blocks of a scope, on every rank."""
        return [each for group in self._parts.roots(root) for each in group]

    def close(self) -> None:
        self._ended.set()
        if self._watching.is_alive():
            self._watching.join()
        self._client.close()
        self._threads.shutdown(cancel_futures=True)
        super().close()

    # Calls whose results come later.

    def saved(self) -> "Future[None]":
        """Done once the pins of every layout are on disk."""

        def saved(nodes: Nodes) -> None:
            for layout in self._parts.layouts:
                nodes[layout].operate("saved")

        return self._later(saved)

    def publish(self, chain: Chain) -> "Future[int]":
        """The number of the prefix's blocks from whose end others can resume by what is in the
        store, once that is all that can be or the time is over; 0 of a private one."""
        if chain.private:
            return done(0)
        prefix = KvPrefix(self._parts, chain)

        def publish(nodes: Nodes) -> int:
            give_up = time.monotonic() + PUBLISH_S
            while True:
                num_sent = prefix.held(nodes.sent)
                if num_sent == len(chain.keys) or time.monotonic() > give_up:
                    return num_sent
                if prefix.is_whole(nodes.sent) and num_sent >= prefix.held(nodes.held):
                    return num_sent  # there is no window or state at a later place
                time.sleep(LOOK_S)

        return self._later(publish)

    def purge(self, roots: Collection[PrefixKey]) -> "Future[Purged]":
        result: Future[Purged] = Future()
        threading.Thread(target=self._purge, args=(roots, result), daemon=True).start()
        return result

    def _purge(self, roots: Collection[PrefixKey], result: "Future[Purged]") -> None:
        every = [each.hex() for root in roots for each in self._roots(root)]
        try:
            with closing(Nodes(self._socket, SLOW_S)) as nodes:
                answers = [
                    nodes[layout].operate("purge", roots=every) for layout in self._parts.layouts
                ]
                running = self._in_flight()
                self._empty_device()
                result.set_result(_purged(roots, answers))
                while running & self._in_flight() and not self._ended.wait(LOOK_S):
                    pass
                self._ended.wait(STORE_S)
        except Exception as error:  # the top of this thread
            if result.done():
                logger.exception("the scopes of a purge were opened early")
            else:
                result.set_exception(PurgeFailed(f"the purge has failed: {error}"))

    def _empty_device(self) -> None:
        """Raises PurgeFailed if vLLM does not empty its own cache."""
        give_up = time.monotonic() + FORGET_S
        while True:
            try:
                if self._forget():
                    return
                why = "its blocks are in use"
            except RemoteFault as error:
                why = str(error)
            if time.monotonic() > give_up:
                raise PurgeFailed(f"vLLM did not empty its own cache: {why}; purge again")
            time.sleep(0.1)

    def _later(self, work: "Callable[[Nodes], T]") -> "Future[T]":
        def run() -> T:
            with closing(Nodes(self._socket, SLOW_S)) as nodes:
                return work(nodes)

        return self._threads.submit(run)


def _purged(roots: Collection[PrefixKey], answers: Sequence[dict[str, Any]]) -> Purged:
    """One result of the answers of every layout's blocks."""
    parts = [answer["removed"].items() for answer in answers]
    removed = total([{TierName(tier): Removed(*n) for tier, n in part} for part in parts])
    pins = tuple(pin for answer in answers for pin in answer["pins"])
    left, in_use = (sum(int(each[name]) for each in answers) for name in ("num_left", "in_use"))
    return Purged(tuple(sorted(roots)), removed, in_use, pins, left)
