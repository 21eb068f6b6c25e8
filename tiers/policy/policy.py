"""The protocol of an eviction policy: an order over the blocks of one tier, and nothing else.

A policy holds no tensor, lock or clock. Each `Use` carries the time. The owner of a tier's
blocks drives one: the engine's thread or a node's.

    insert ──► candidate ──victim()──► forgotten
                 │   ▲
             hold│   │release                remove() forgets a block that left for another reason
                 ▼   │
                held            a held block is referenced by a running request and never a victim
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """One request's use of its chain of blocks. The same object is passed for each block. Within
    one policy, `time_s` never runs backwards by more than rounding."""

    time_s: float
    tenant: Hashable = None
    windows: bool = True  # it needed the layers with windows, of blocks whose layout has any


class Policy(Protocol[K]):
    """Chooses which block leaves. Every call is O(1) amortised unless the policy says otherwise.

    A request releases its blocks **tail first**. Among blocks used at the same moment, the head of
    the chain is then the most recent, so a leaf leaves before its parent. A child whose parent has
    left cannot be reached.
    """

    def insert(self, key: K, use: Use) -> None:
        """Add a key that is new in the tier. It may be chosen from now on. For a block that a
        running request computes, call this when it is first released."""

    def hold(self, key: K) -> None:
        """Mark `key` as referenced. It is not a victim until `release`. Calls do not nest."""

    def release(self, key: K, use: Use) -> None:
        """Count one use of a held `key` and let it be chosen again: its last reference is gone."""

    def touch(self, key: K, use: Use) -> None:
        """Count one use of a `key` that was not held. The same as `hold` and then `release`."""

    def remove(self, key: K) -> None:
        """Remove `key`, held or not, which left for another reason. Ignores unknown keys."""

    def victim(self) -> K | None:
        """Choose the block to evict and forget it. None if every block is held."""

    def coldest(self, count: int) -> list[K]:
        """Roughly the next `count` victims, coldest first. Changes nothing. Lets a tier copy blocks
        down ahead of need. The order may change in the meantime."""
