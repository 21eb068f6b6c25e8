"""Operations on blocks in a node, for a server with vLLM.

The node carries them out. Slow calls have their own threads, each with a connection. A purge first
closes its scopes in the node, then makes vLLM empty its own cache. The scopes stay closed until
every running request has ended and stored its blocks.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from cachesvc.server.vllm.node_pins import NodePins
from cachesvc.server.vllm.node_prefixes import KvParts, block_of
from cachesvc.vllm.groups import KvGroup
from engine.errors import EngineError, RemoteFault
from tiers.blocks.chain import Chain
from tiers.blocks.keys import BlockId, PrefixKey
from tiers.blocks.layout import BlockLayout
from tiers.node.client import NodeClient
from tiers.operations.purge import Purged
from tiers.tier import Removed, TierName

logger = logging.getLogger(__name__)

SLOW_S = 120.0  # for answers that need the disk
TRACED_KEYS = 1024  # asked for at once
FORGET_S = 30.0  # how long to try to empty vLLM's own cache
STORE_S = 10.0  # time to store a request's blocks after its end
PUBLISH_S = 8.0
LOOK_S = 0.02
T = TypeVar("T")


class ElsewhereError(EngineError):
    """The blocks are not in this process; the message says where they are."""


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
    """Operations on the node at `socket`.

    `forget` empties vLLM's own cache. `in_flight` returns the running requests.
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
        self.parts = KvParts(tuple(groups), num_ranks)
        self.pins = NodePins(socket, self.parts)
        self._forget = forget
        self._in_flight = in_flight
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="cachesvc-node-operate")
        self._ended = threading.Event()
        self.owners: Mapping[PrefixKey, str] = {}  # owner of each scope, for the node's quotas

    def introduce(self, node: NodeClient) -> None:
        """Sends the owners of scopes to a newly joined node. Raises NodeError."""
        if self.owners:
            node.know(
                {each: name for root, name in self.owners.items() for each in self._roots(root)}
            )

    def _roots(self, root: PrefixKey) -> list[PrefixKey]:
        """The roots of every group's blocks of a scope, on every rank."""
        return [each for group in self.parts.roots(root) for each in group]

    def close(self) -> None:
        self._ended.set()
        self._threads.shutdown(cancel_futures=True)
        self.pins.close()

    # Calls whose results come later.

    def saved(self) -> "Future[None]":
        """Done once the pins of every layout are on disk."""

        def saved(nodes: _Nodes) -> None:
            for layout in self.parts.layouts:
                nodes[layout].operate("saved")

        return self._later(saved)

    def evict(self, keys: Sequence[PrefixKey]) -> "Future[dict[TierName, int]]":
        """Remove these blocks, and those of other groups and ranks that have their tokens. The
        result counts all of them."""

        def evict(nodes: _Nodes) -> dict[TierName, int]:
            wanted = {layout: list(keys) for layout in self.parts.layouts}
            if not self.parts.are_one:
                wanted = self.parts.spanning(keys, _traced(nodes[self.parts.layouts[0]], keys))
            removed: Counter[TierName] = Counter()
            for layout, each in wanted.items():
                counts = nodes[layout].operate("evict", keys=[key.hex() for key in each])
                removed.update({TierName(tier): count for tier, count in counts.items()})
            return dict(removed)

        return self._later(evict)

    def publish(self, chain: Chain) -> "Future[int]":
        """The number of the prefix's blocks from whose end others can resume by what is in the
        store, once that is all that can be or the time is over."""
        prefix = self.parts.prefix(chain)

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
                    nodes[layout].operate("purge", roots=every) for layout in self.parts.layouts
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


def _traced(node: NodeClient, keys: Sequence[PrefixKey]) -> list[BlockId]:
    """These blocks and those before them, as far as the node holds them."""
    found: list[BlockId] = []
    for begin in range(0, len(keys), TRACED_KEYS):
        asked = [key.hex() for key in keys[begin : begin + TRACED_KEYS]]
        found += map(block_of, node.operate("trace", keys=asked)["blocks"])
    return found


def _purged(roots: Collection[PrefixKey], answers: Sequence[dict[str, Any]]) -> Purged:
    """One result of the answers of every layout's blocks."""
    removed: dict[TierName, Removed] = {}
    for tier, counts in (each for answer in answers for each in answer["removed"].items()):
        name = TierName(tier)
        removed[name] = removed.get(name, Removed()).plus(Removed(*counts))
    pins = tuple(pin for answer in answers for pin in answer["pins"])
    left, in_use = (sum(int(each[name]) for each in answers) for name in ("num_left", "in_use"))
    return Purged(tuple(sorted(roots)), removed, in_use, pins, left)
