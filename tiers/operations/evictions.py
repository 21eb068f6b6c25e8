"""Evicts blocks that an operator names from every tier, while the engine runs.

The thread of the engine or of the node.
"""

from collections.abc import Sequence
from concurrent.futures import Future

from tiers.blocks.keys import PrefixKey
from tiers.memory.block import Block, BlockState
from tiers.memory.residency import Residency
from tiers.operations.below import ask_writer
from tiers.tier import TierName
from tiers.transfer.mover import Mover


class Evictions:
    """Nobody finds an evicted block any more. One that is written or copied keeps its frame."""

    def __init__(self, residency: Residency, mover: Mover | None) -> None:
        self._residency = residency
        self._mover = mover
        self.leaving: list[Block] = []  # evicted, but their frames are busy
        self._below: list[tuple[Sequence[PrefixKey], Future[dict[TierName, int]]]] = []

    @property
    def is_active(self) -> bool:
        return bool(self.leaving or self._below)

    def evict(self, keys: Sequence[PrefixKey]) -> "Future[dict[TierName, int]]":
        """Remove blocks from every tier, except those in use or pinned. Returns how many were
        removed, by tier.

        Below, blocks that memory still has are left out: their users may count on the copy there.
        The writer thread does this after the writes that it has begun.
        """
        residency, index = self._residency, self._residency.index
        removed: dict[TierName, int] = dict.fromkeys(residency.tiers, 0)
        for key in keys:
            block = index.get(key)
            if block is not None and not (block.ref_count or block.pinned):
                if block.slot is not None:
                    removed[TierName.DEVICE] += 1
                if block.frame is not None and block.state is BlockState.READY:
                    removed[TierName.HOST] += 1
                if not residency.forget_everywhere(block):
                    self.leaving.append(block)
        loose = [key for key in keys if index.get(key) is None]
        result = ask_writer(
            self._mover, lambda tier: {**removed, tier.name: tier.discard(loose)}, removed
        )
        self._below.append((loose, result))
        return result

    def step(self) -> None:
        """Free the frames that are busy no more, and take in what is below no more: some of it may
        have been loaded, or begun to load, before the writer thread removed it."""
        if self.leaving:
            self.leaving = [b for b in self.leaving if not self._residency.discard(b)]
        while self._below and self._below[0][1].done():
            keys, _ = self._below.pop(0)
            for block in filter(None, map(self._residency.index.get, keys)):
                self._residency.queue.dropped(block)
                self._residency.host.sync(block)
