"""Claims: blocks in use that no policy counts yet, counted for their owners' quotas.

A policy counts a block from its first release on. Until then a claim counts it. The claim is made
before the slot is taken, so that among equal shares the requester is over its share and gives way.
Engine thread only. Without quotas every call returns at once.
"""

from collections.abc import Hashable, Mapping

from tiers.memory.block import Block
from tiers.policy.quota import Quotas
from tiers.tier import Cause, TierName


class Claims:
    """The quotas of the memory tiers. `block_bytes` is a block's size there."""

    def __init__(self, quotas: Mapping[TierName, Quotas], block_bytes: int) -> None:
        self._quotas = quotas
        self._block_bytes = block_bytes
        self._slots: dict[Block, Hashable] = {}  # block -> group

    def claim_slot(self, block: Block, tenant: Hashable) -> None:
        """The block is about to get a slot."""
        if self._quotas:
            quotas = self._quotas[TierName.DEVICE]
            group = self._slots[block] = quotas.group(tenant)
            quotas.charge(group, self._block_bytes)

    def release_slot(self, block: Block) -> None:
        """The block has no slot after all, or the policy counts it from now on."""
        if block in self._slots:
            group = self._slots.pop(block)
            self._quotas[TierName.DEVICE].credit(group, self._block_bytes)

    def move_slot(self, block: Block, to: Block) -> None:
        if block in self._slots:
            self._slots[to] = self._slots.pop(block)

    def weigh_frame(self, tenant: Hashable, num_blocks: int) -> None:
        """Counts a frame for its future owner while a victim is chosen on the host."""
        quotas = self._quotas.get(TierName.HOST)
        if quotas is not None:
            quotas.charge(quotas.group(tenant), num_blocks * self._block_bytes)

    def may_lose_frame(self, block: Block) -> bool:
        """Whether a block may leave the host although it is pinned."""
        quotas = self._quotas.get(TierName.HOST)
        return quotas is None or quotas.is_over(quotas.group(block.scope))

    def cause(self, tier: TierName, victim: Block, tenant: Hashable) -> Cause:
        """Why a victim leaves for `tenant`: for its own group, or because its group is over its
        share."""
        quotas = self._quotas.get(tier)
        if quotas is None or quotas.group(victim.use.tenant) == quotas.group(tenant):
            return Cause.ROOM
        return Cause.QUOTA
