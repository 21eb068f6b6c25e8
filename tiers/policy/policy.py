"""What an eviction policy is: an order over the blocks of one tier, and nothing else.

A policy holds no tensor, no lock and no clock: time comes in with each `Use`. The engine thread
drives one for the device pool and one for the host arena; `tiers.replay.replay` drives the same
code over traces.

    insert ──► candidate ──victim()──► forgotten (some policies keep a ghost: the key alone)
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
    """One request's use of its chain of blocks; the same object is passed for each of the blocks.

    `time_s` never runs backwards within one policy by more than rounding.
    """

    time_s: float
    num_blocks: int  # the length of the request's chain
    tenant: Hashable = None


class Policy(Protocol[K]):
    """Chooses which block leaves. Every call is O(1) amortised unless the policy says otherwise.

    A request gives its blocks back **tail first**: among blocks used at the same moment the head of
    the chain is then the most recent, so a leaf leaves before its parent. A child whose parent left
    cannot be reached.
    """

    def insert(self, key: K, use: Use, parent: K | None = None, depth: int = 0) -> None:
        """`key` is new in the tier and may be chosen from now on.

        For a block that a running request computes, call this when it is first released.
        `parent` is the key before it in the chain (None: it is the first), `depth` its number
        there from 0.
        """
        ...

    def hold(self, key: K) -> None:
        """`key` is referenced: not a victim until `release`. Calls do not nest."""
        ...

    def release(self, key: K, use: Use) -> None:
        """The last reference to a held `key` is gone: count one use, and let it be chosen again."""
        ...

    def touch(self, key: K, use: Use) -> None:
        """`key` was used without being held: the same as `hold` and `release` at once."""
        ...

    def remove(self, key: K) -> None:
        """`key`, held or not, left the tier for another reason. Unknown keys are ignored."""
        ...

    def victim(self) -> K | None:
        """Choose the block to evict and forget it; None where every block is held."""
        ...

    def coldest(self, count: int) -> list[K]:
        """About the next `count` victims, coldest first; changes nothing.

        It lets a tier copy blocks down ahead of need. The order may change in the meantime.
        """
        ...
