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
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, TypeVar

from cachesvc.vllm.identity import group_roots, rank_roots
from engine.errors import EngineError
from tiers.blocks.chain import Chain
from tiers.blocks.keys import BlockId, PrefixKey, child_key
from tiers.blocks.layout import BlockLayout
from tiers.disk.pin_file import pin_of
from tiers.errors import NodeError
from tiers.node.client import NodeClient
from tiers.operations.purge import Purged
from tiers.policy.retention import Pin, PinError
from tiers.tier import Removed, TierName

logger = logging.getLogger(__name__)

QUICK_S = 2.0  # for answers that the engine's thread waits for
SLOW_S = 120.0  # for answers that need the disk
FORGET_S = 30.0  # how long to try to empty vLLM's own cache
STORE_S = 10.0  # time to store a request's blocks after its end
PUBLISH_S = 8.0
LOOK_S = 0.02
T = TypeVar("T")


class ElsewhereError(EngineError):
    """The blocks are not in this process; the message says where they are."""


class NodeOperations:
    """Operations on the node at `socket`.

    `forget` empties vLLM's own cache. `in_flight` returns the running requests.
    """

    def __init__(
        self,
        socket: Path,
        layouts: Sequence[BlockLayout],
        num_ranks: int,
        *,
        forget: Callable[[], "Future[bool]"],
        in_flight: Callable[[], frozenset[str]],
    ) -> None:
        self._socket = socket
        self._layouts = tuple(layouts)  # of each group; prefixes are counted in the first's blocks
        self._num_ranks = num_ranks
        self._forget = forget
        self._in_flight = in_flight
        self._quick = NodeClient(socket, layouts[0], timeout_s=QUICK_S)
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="cachesvc-node-operate")
        self._pins: list[Pin[PrefixKey]] = []
        self._ended = threading.Event()
        self.owners: Mapping[PrefixKey, str] = {}  # owner of each scope, for the node's quotas

    def introduce(self, node: NodeClient) -> None:
        """Sends the owners of scopes to a newly joined node. Raises NodeError."""
        if self.owners:
            node.know(
                {each: name for root, name in self.owners.items() for each in self._parts(root)}
            )

    def _parts(self, root: PrefixKey) -> list[PrefixKey]:
        """The roots of every group's blocks of a scope, on every rank."""
        groups = group_roots(root, len(self._layouts))
        return [each for group in groups for each in rank_roots(group, self._num_ranks)]

    def close(self) -> None:
        self._ended.set()
        self._threads.shutdown(cancel_futures=True)
        self._quick.close()

    # The engine's thread.

    def pin(
        self,
        name: str,
        scope: PrefixKey,
        keys: Sequence[PrefixKey],
        for_s: float,
        why: str,
        owner: str,
    ) -> Pin[PrefixKey]:
        if self._num_ranks > 1:
            raise PinError("pins are not kept with tensor parallelism: each rank has its own keys")
        if len(self._layouts) > 1:
            raise PinError("pins are not kept for a model with several groups of KV")
        answer = self._ask(
            "pin",
            name=name,
            scope=scope.hex(),
            keys=[key.hex() for key in keys],
            for_s=for_s,
            why=why,
            owner=owner,
        )
        if "refused" in answer:
            raise PinError(answer["refused"], answer["excess"])
        return pin_of(answer["pin"])

    def unpin(self, name: str) -> bool:
        return bool(self._ask("unpin", name=name)["found"])

    def pins(self) -> list[Pin[PrefixKey]]:
        """The node's pins; while it is unreachable, the last known ones."""
        try:
            self._pins = [pin_of(fields) for fields in self._ask("pins")["pins"]]
        except PinError as error:
            logger.warning(f"pins are shown as they were: {error}")
        return self._pins

    # Calls whose results come later.

    def saved(self) -> "Future[None]":
        return self._later(lambda node: (node.operate("saved"), None)[1])

    def evict(self, keys: Sequence[PrefixKey]) -> "Future[dict[TierName, int]]":
        def evict(node: NodeClient) -> dict[TierName, int]:
            removed = node.operate("evict", keys=[key.hex() for key in keys])
            return {TierName(tier): count for tier, count in removed.items()}

        return self._later(evict)

    def publish(self, chain: Chain) -> "Future[int]":
        """The number of the prefix's blocks in the store, once all are there or the time is
        over."""
        ids = chain.block_ids(0, len(chain.keys))
        runs = [_under(root, ids) for root in rank_roots(chain.root, self._num_ranks)]

        def publish(node: NodeClient) -> int:
            give_up = time.monotonic() + PUBLISH_S
            while True:
                num_sent = min(node.publish(run) for run in runs)
                if num_sent == len(ids) or time.monotonic() > give_up:
                    return num_sent
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
        every = [each.hex() for root in roots for each in self._parts(root)]
        try:
            with ExitStack() as nodes:
                answers = []
                for layout in dict.fromkeys(self._layouts):
                    node = NodeClient(self._socket, layout, timeout_s=SLOW_S)
                    nodes.enter_context(closing(node)).connect()
                    answers.append(node.operate("purge", roots=every))
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
                if self._forget().result(FORGET_S):
                    return
                why = "its blocks are in use"
            except Exception as error:  # noqa: BLE001 - vLLM's errors have no common root
                why = str(error)
            if time.monotonic() > give_up:
                raise ElsewhereError(f"vLLM did not empty its own cache: {why}; purge again")
            time.sleep(0.1)

    def _ask(self, what: str, **about: Any) -> dict[str, Any]:
        try:
            if not self._quick.is_connected:
                self._quick.connect()
            return self._quick.operate(what, **about)
        except NodeError as error:
            self._quick.close()
            raise PinError(f"the node keeps the pins, and does not answer: {error}") from error

    def _later(self, work: Callable[[NodeClient], T]) -> "Future[T]":
        def run() -> T:
            with closing(NodeClient(self._socket, self._layouts[0], timeout_s=SLOW_S)) as node:
                node.connect()
                return work(node)

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


def _under(root: PrefixKey, ids: Sequence[BlockId]) -> list[BlockId]:
    """The ids of the same tokens' blocks on another rank."""
    if not ids or ids[0].scope == root:
        return list(ids)
    found, parent = [], root
    for block in ids:
        key = child_key(parent, block.tokens, block.content)
        found.append(BlockId(root, parent, key, block.tokens, block.content))
        parent = key
    return found
