"""Copies in progress between slots and frames. Engine thread only.

On a CPU a copy is done when it returns. On a GPU it runs on its own stream, and the frame must be
kept until the bytes have arrived.
"""

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

from tiers.errors import CopyFailed, MissReason
from tiers.memory.block import Block
from tiers.memory.counters import MemoryCounters
from tiers.memory.device import Copy
from tiers.memory.host_tier import HostTier
from tiers.tier import TierName

logger = logging.getLogger(__name__)


class _Copying(NamedTuple):
    copy: Copy
    blocks: Sequence[Block]
    source: TierName
    target: TierName
    started: float  # time.perf_counter()
    nbytes: int | None


class Copies:
    """Invariant: a block's `busy` counts its copies here, and the writer's reading."""

    def __init__(self, host: HostTier, counters: MemoryCounters) -> None:
        self._host = host
        self._counters = counters
        self._under_way: list[_Copying] = []

    def __len__(self) -> int:
        return len(self._under_way)

    def watch(
        self,
        copy: Copy,
        blocks: Sequence[Block],
        source: TierName,
        target: TierName,
        started: float,
        nbytes: int | None = None,
    ) -> None:
        """Keep the blocks' frames until the copy, of `nbytes` if not of whole blocks, arrived."""
        copying = _Copying(copy, blocks, source, target, started, nbytes)
        if copy.done():
            self._arrived(copying)
            return
        for block in blocks:
            block.busy += 1
            self._host.sync(block)
        self._under_way.append(copying)

    def failed(self, source: TierName, error: CopyFailed) -> None:
        """Count a copy out of `source` that the device refused. Logs the first, and ever fewer."""
        count = self._counters.fault(source, MissReason.COPY)
        if count & (count - 1) == 0:
            logger.warning(f"{error} ({count} copies out of the {source} tier failed so far)")

    def poll(self) -> None:
        """Releases frames whose copy has arrived."""
        if not self._under_way:
            return
        waiting = []
        for copying in self._under_way:
            if not copying.copy.done():
                waiting.append(copying)
                continue
            self._arrived(copying)
            for block in copying.blocks:
                block.busy -= 1
                assert block.busy >= 0, f"{block} was copied once too often"
                self._host.sync(block)
        self._under_way = waiting

    def _arrived(self, copying: _Copying) -> None:
        elapsed_s = time.perf_counter() - copying.started
        self._counters.transfers.observe(
            copying.source, copying.target, len(copying.blocks), elapsed_s, copying.nbytes
        )
