"""What operators and the server ask of the cache, wherever its blocks are, and what only a cache in
this process can tell.

`tiers.operations.operations.TierOperations` has the tiers in this process. A server over vLLM has
them elsewhere, and its face is `CacheOperations` alone. `Engine.call` runs a function with it on
the engine's thread, and only there may it be used, except for `places_below`. A call with a future
waits for a disk or for another process.

Methods raise here: `CacheOperations.pins` type-checks where a function of the cache is asked for,
and would answer None for every cache.
"""

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Protocol

from tiers.blocks.chain import Chain, KeyedPrefix
from tiers.blocks.keys import BlockId, PrefixKey
from tiers.memory.index import BlockIndex
from tiers.policy.retention import Pin, PinKind
from tiers.tier import Purged, TierName


class CacheOperations(Protocol):
    """What operators ask of every cache."""

    @property
    def now_s(self) -> float:
        """The clock of pins: Unix seconds, unaffected when the wall clock is set."""
        raise NotImplementedError

    def pin(
        self,
        name: str,
        prefix: Chain | KeyedPrefix,
        until_s: float,
        why: str = "",
        *,
        owner: str = "",
    ) -> Pin[PrefixKey]:
        """Pin a prefix in at least one tier until `until_s` (Unix seconds); see
        `tiers.operations.pins`.

        A pin of the same name is replaced. The pin is in force at once. It survives a restart once
        `saved` is done. Raises PinError.
        """
        raise NotImplementedError

    def unpin(self, name: str) -> bool:
        """End a pin. Returns whether there was one of that name."""
        raise NotImplementedError

    def pins(self) -> list[Pin[PrefixKey]]:
        """Every pin in force."""
        raise NotImplementedError

    def saved(self) -> "Future[None]":
        """Done once the current pins are on disk. Fails if they could not be written."""
        raise NotImplementedError

    # Changing.

    def publish(self, chain: Chain) -> "Future[int] | None":
        """Send a prefix to the shared store. The result is the number of its blocks there.

        None while some blocks are still being written to the disk, from which they are sent: call
        again.
        """
        raise NotImplementedError

    def purge(self, roots: Collection[PrefixKey]) -> "Future[Purged]":
        """Remove every block of these scopes from every tier; see `tiers.operations.purge`."""
        raise NotImplementedError


class BlockOperations(CacheOperations, Protocol):
    """Of a cache in this process. `index` holds the blocks in memory."""

    @property
    def index(self) -> BlockIndex: ...

    @property
    def mark_seed(self) -> int:
        """The seed of `tiers.telemetry.misses.marks_of` in this cache's findings."""
        raise NotImplementedError

    def sources(self, chain: Chain) -> list[TierName]:
        """The memory tiers of its leading blocks. Those being computed count as the device's."""
        raise NotImplementedError

    def places_below(self, ids: Sequence[BlockId]) -> list[TierName]:
        """The lower tier of each block of the leading run there. Waits. Any thread."""
        raise NotImplementedError

    def evict(self, keys: Sequence[PrefixKey]) -> "Future[dict[TierName, int]]":
        """Remove blocks, except those in use or pinned. The result counts them by tier."""
        raise NotImplementedError

    def prefix_of(self, key: PrefixKey) -> "Future[KeyedPrefix]":
        """The prefix that ends with block `key`. It has no keys if a block is missing."""
        raise NotImplementedError

    def check(self) -> None:
        """Assert that blocks are conserved. Call it while nothing runs."""
        raise NotImplementedError

    def retain(self, name: str, chain: Chain, until_s: float, *, owner: str, kind: PinKind) -> int:
        """Pin as many blocks of a prefix as its owner may, at once. Returns how many."""
        raise NotImplementedError

    def renew(self, name: str, until_s: float) -> None:
        """Extend a pin of that name to at least `until_s`, if there is one."""
        raise NotImplementedError
