"""A self-reconnecting connection to the node. An unreachable node is a miss, never an error."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from tiers.blocks.keys import BlockId
from tiers.blocks.layout import BlockLayout
from tiers.errors import NodeError, NodeGone
from tiers.node.arena import SharedMemory
from tiers.node.client import NodeClient
from tiers.tier import TierName
from tiers.transfer.economy import CostLine

logger = logging.getLogger(__name__)

RETRY_S = 1.0  # pause after a failure of the node
REFUSED_S = 60.0  # and before a node that refused, and logs that, is joined unasked again

T = TypeVar("T")


class NodeLink:
    """One thread's connection to the node. `faults` counts calls that failed."""

    def __init__(
        self,
        path: Path,
        layout: BlockLayout,
        *,
        timeout_s: float,
        maps: bool = True,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = NodeClient(path, layout, timeout_s=timeout_s, maps=maps)
        self._timeout_s = timeout_s
        self._clock_s = clock_s
        self._not_before_s = self._not_joined_before_s = float("-inf")
        self._is_away = False  # and that was logged
        self.faults = 0

    def probe(self, ids: Sequence[BlockId]) -> list[TierName]:
        """The tiers of the leading blocks that are held; empty while the node is unreachable."""
        return self.attempt(lambda node: node.probe(ids)) or []

    def fetch(self, ids: Sequence[BlockId]) -> None:
        """Have the node load this run into its memory for a lease."""
        self.attempt(lambda node: node.fetch(ids))

    def join(self) -> None:
        """Connect if the node is there and is not joined yet. Waits `RETRY_S` at most."""
        self._client.answer_within(RETRY_S)
        if self._client.is_connected or self._clock_s() < self._not_joined_before_s:
            return
        try:
            self._client.connect()
        except NodeError as error:  # whoever asks it for something says so
            if not isinstance(error, NodeGone):
                self._not_joined_before_s = self._clock_s() + REFUSED_S

    def attempt(self, use: Callable[[NodeClient], T], timeout_s: float | None = None) -> T | None:
        """The result of `use` with the connected node; None if the node is unreachable or fails.
        `timeout_s` is for each of its answers, if not the usual one."""
        self._client.answer_within(self._timeout_s if timeout_s is None else timeout_s)
        try:
            if not self._client.is_connected:
                if self._clock_s() < self._not_before_s:
                    return None
                self._client.connect()
            used = use(self._client)
        except NodeError as error:
            self.faults += 1
            self._client.close()
            self._not_before_s = self._clock_s() + RETRY_S
            if not self._is_away:  # log once: a node may be away for a day
                self._is_away = True
                logger.warning(f"cachesvc: served without the node until it is back: {error}")
            return None
        if self._is_away:
            self._is_away = False
            logger.warning("cachesvc: the node is back")
        return used

    @property
    def loads(self) -> Mapping[TierName, CostLine]:
        """The seconds of a load from each tier by its bytes, as the node told with a probe."""
        return self._client.loads

    @property
    def memory(self) -> SharedMemory | None:
        """The node's memory as this connection maps it, while there is one."""
        return self._client.memory

    def close(self) -> None:
        self._client.close()
