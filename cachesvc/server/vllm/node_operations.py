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

from cachesvc.server.vllm.core import ElsewhereError
from cachesvc.server.vllm.node import NodeWatch
from cachesvc.server.vllm.node_pins import NodePins
from cachesvc.server.vllm.node_prefixes import KvParts
from cachesvc.vllm.groups import KvGroup
from engine.errors import RemoteFault
from tiers.blocks.chain import Chain, KeyedPrefix
from tiers.blocks.keys import BlockId, PrefixKey
from tiers.blocks.layout import BlockLayout
from tiers.node.client import NodeClient
from tiers.node.counters import NodeCounters
from tiers.operations.below import done
from tiers.policy.retention import Pin
from tiers.steady_clock import SteadyClock
from tiers.tier import Purged, Removed, TierName

logger = logging.getLogger(__name__)

SLOW_S = 120.0  # for answers that need the disk
FORGET_S = 30.0  # how long to try to empty vLLM's own cache
STORE_S = 10.0  # time to store a request's blocks after its end
PUBLISH_S = 8.0
LOOK_S = 0.02
T = TypeVar("T")


class _Nodes:
    """Connections for slow work, one for each layout that is asked for. One thread."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._nodes: dict[BlockLayout, NodeClient] = {}

    def __getitem__(self, layout: BlockLayout) -> NodeClient:
        if layout not in self._nodes:
            node = NodeClient(self._socket, layout, timeout_s=SLOW_S)
            node.connect()
            self._nodes[layout] = node
        return self._nodes[layout]

    def held(self, layout: BlockLayout, run: Sequence[BlockId]) -> list[TierName]:
        """The tiers of the leading blocks that the node has."""
        return self[layout].probe(run)

    def sent(self, layout: BlockLayout, run: Sequence[BlockId]) -> list[TierName]:
        """Send these blocks to the store. Returns as many tiers as leading ones are there."""
        return [TierName.REMOTE] * self[layout].publish(run)

    def close(self) -> None:
        for node in self._nodes.values():
            node.close()


class NodeOperations:
    """`BlocksElsewhere` in the node at `socket`, below the engine that has these groups.

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
        self._socket = socket
        self._parts = KvParts(tuple(groups), num_ranks)
        self._pins = NodePins(socket, self._parts)
        self._watch = NodeWatch(socket, self._introduce)
        self._clock = SteadyClock()
        self._forget = forget
        self._in_flight = in_flight
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="cachesvc-node-operate")
        self._ended = threading.Event()
        self._owners: Mapping[PrefixKey, str] = {}

    def start(self) -> None:
        self._pins.pins()  # makes the node open the layouts' tiers
        self._watch.look()
        self._watch.start()

    @property
    def counters(self) -> NodeCounters:
        """As they were read last; none while the node does not answer."""
        return self._watch.counters

    def tell_owners(self, owners: Mapping[PrefixKey, str]) -> None:
        """Passes the owners of scopes to the node for quotas, now and after its next start."""
        self._owners = owners
        self._watch.join_again()

    def _introduce(self, node: NodeClient) -> None:
        """Sends the owners to a newly joined node. Raises NodeError."""
        if self._owners:
            node.know(
                {each: name for root, name in self._owners.items() for each in self._roots(root)}
            )

    def _roots(self, root: PrefixKey) -> list[PrefixKey]:
        """The roots of every group's blocks of a scope, on every rank."""
        return [each for group in self._parts.roots(root) for each in group]

    def close(self) -> None:
        self._watch.close()
        self._ended.set()
        self._threads.shutdown(cancel_futures=True)
        self._pins.close()

    @property
    def now_s(self) -> float:
        return self._clock()

    def pin(
        self,
        name: str,
        prefix: Chain | KeyedPrefix,
        until_s: float,
        why: str = "",
        *,
        owner: str = "",
    ) -> Pin[PrefixKey]:
        return self._pins.pin(name, prefix, until_s - self.now_s, why, owner)

    def unpin(self, name: str) -> bool:
        return self._pins.unpin(name)

    def pins(self) -> list[Pin[PrefixKey]]:
        return self._pins.pins()

    # Calls whose results come later.

    def saved(self) -> "Future[None]":
        """Done once the pins of every layout are on disk."""

        def saved(nodes: _Nodes) -> None:
            for layout in self._parts.layouts:
                nodes[layout].operate("saved")

        return self._later(saved)

    def publish(self, chain: Chain) -> "Future[int]":
        """The number of the prefix's blocks from whose end others can resume by what is in the
        store, once that is all that can be or the time is over; 0 of a private one."""
        if chain.private:
            return done(0)
        prefix = self._parts.prefix(chain)

        def publish(nodes: _Nodes) -> int:
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
        work = threading.Thread(
            target=self._purge, args=(roots, result), name="cachesvc-node-purge", daemon=True
        )
        work.start()
        return result

    def _purge(self, roots: Collection[PrefixKey], result: "Future[Purged]") -> None:
        every = [each.hex() for root in roots for each in self._roots(root)]
        try:
            with closing(_Nodes(self._socket)) as nodes:
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
                result.set_exception(ElsewhereError(f"the purge has failed: {error}"))

    def _empty_device(self) -> None:
        """Raises ElsewhereError if vLLM does not empty its own cache."""
        give_up = time.monotonic() + FORGET_S
        while True:
            try:
                if self._forget():
                    return
                why = "its blocks are in use"
            except RemoteFault as error:
                why = str(error)
            if time.monotonic() > give_up:
                raise ElsewhereError(f"vLLM did not empty its own cache: {why}; purge again")
            time.sleep(0.1)

    def _later(self, work: "Callable[[_Nodes], T]") -> "Future[T]":
        def run() -> T:
            with closing(_Nodes(self._socket)) as nodes:
                return work(nodes)

        return self._threads.submit(run)


def _purged(roots: Collection[PrefixKey], answers: Sequence[dict[str, Any]]) -> Purged:
    """One result of the answers of every layout's blocks."""
    removed: dict[TierName, Removed] = {}
    for tier, counts in (each for answer in answers for each in answer["removed"].items()):
        name = TierName(tier)
        removed[name] = removed.get(name, Removed()).plus(Removed(*counts))
    pins = tuple(pin for answer in answers for pin in answer["pins"])
    left, in_use = (sum(int(each[name]) for each in answers) for name in ("num_left", "in_use"))
    return Purged(tuple(sorted(roots)), removed, in_use, pins, left)
