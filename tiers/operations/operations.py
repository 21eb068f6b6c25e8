"""The operators' face of the tiers in this process. `TieredCache` owns one. Engine thread only."""

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from tiers.blocks.chain import Chain, KeyedPrefix
from tiers.blocks.keys import BlockId, PrefixKey
from tiers.disk.pin_file import load_pins, save_pins
from tiers.memory.block import Block
from tiers.memory.index import BlockIndex
from tiers.memory.residency import Residency
from tiers.operations.below import ask_writer, done, then, trace
from tiers.operations.evictions import Evictions
from tiers.operations.pins import Keeper
from tiers.operations.purge import Purger, with_checkpoints
from tiers.policy.quota import GroupUse, Quotas
from tiers.policy.retention import Pin, PinError, PinKind
from tiers.tier import ManagedTier, Purged, TierName
from tiers.transfer.demotion import Demoter
from tiers.transfer.mover import Mover

AT_END = 2  # last blocks of a pinned prefix: a prompt's checkpoint is after one of them


class TierOperations:
    """A `BlockOperations`. `blocked` holds the scopes being purged."""

    def __init__(
        self,
        residency: Residency,
        demoter: Demoter,
        mover: Mover | None,
        disk: ManagedTier | None,
        *,
        capacities: Mapping[TierName, int],
        quotas: Mapping[TierName, Quotas],
        pinned_share: float,
        pin_folder: Path | None,
        wall_clock: Callable[[], float],
        checkpoints: "TierOperations | None" = None,
    ) -> None:
        """`capacities`: blocks of each tier, hottest first. `pinned_share`: the share of the lowest
        tier that pins may take. `checkpoints` are those of recurrent states, which are evicted and
        purged with the blocks."""
        self._checkpoints = checkpoints
        self._residency = residency
        self._demoter = demoter
        self._mover = mover
        self._disk = disk
        self._capacities = capacities
        self._quotas = quotas
        self._pinned_share = pinned_share
        self._pin_folder = pin_folder
        lowest = list(capacities)[-1]
        share = pinned_share if lowest is not TierName.DEVICE else 0.0
        self.keeper = Keeper(
            residency,
            max_blocks=int(share * capacities[lowest]),
            block_tokens=residency.pool.layout.block_size,
            write=demoter.write,
            keep_below=disk.keep if disk is not None else lambda keys: None,
            changed=self._save_pins,
            clock=wall_clock,
            most_owned=self._most_owned,
        )
        self.purger = Purger(residency, mover, self.keeper.unpin_scopes)
        self.evictions = Evictions(residency, mover)
        self.mark_seed = secrets.randbits(64)
        self._saved: Future[None] = done(None)
        self._pins_now: tuple[Pin[PrefixKey], ...] = ()
        if pin_folder is not None:
            self.keeper.restore(load_pins(pin_folder))
            for pin in self.keeper.pins():
                self._keep_checkpoint(pin.name)

    @property
    def index(self) -> BlockIndex:
        return self._residency.index

    @property
    def blocked(self) -> frozenset[PrefixKey]:
        if self._checkpoints is not None:
            return self.purger.blocked | self._checkpoints.blocked
        return self.purger.blocked

    def step(self) -> None:
        """Do one step's share of the pending work."""
        self.keeper.step()
        self.purger.step()
        self.evictions.step()

    def sources(self, chain: Chain) -> list[TierName]:
        if chain.root in self.blocked:
            return []
        host, device = TierName.HOST, TierName.DEVICE
        return [
            host if block.slot is None and block.frame is not None else device
            for block in self.index.match(chain)
        ]

    def places_below(self, ids: Sequence[BlockId]) -> list[TierName]:
        return self._disk.places(ids)[0] if self._disk is not None else []

    @property
    def leaving(self) -> list[Block]:
        """Blocks that were purged or evicted, and still have their frames."""
        return [*self.purger.leaving, *self.evictions.leaving]

    def check(self) -> None:
        self._residency.check(detached=self.leaving)

    @property
    def now_s(self) -> float:
        return self.keeper.clock()

    def pin(
        self,
        name: str,
        prefix: Chain | KeyedPrefix,
        until_s: float,
        why: str = "",
        *,
        owner: str = "",
    ) -> Pin[PrefixKey]:
        if self._disk is None and self._residency.frames is None:
            raise PinError("pins need a host or a disk tier; set cache.host_bytes")
        pin = self.keeper.pin(name, prefix.root, prefix.keys, until_s, why, owner=owner)
        self._keep_checkpoint(name)
        return pin

    def retain(self, name: str, chain: Chain, until_s: float, *, owner: str, kind: PinKind) -> int:
        if chain.private or chain.root in self.blocked:
            return 0
        kept = self.keeper.retain(name, chain.root, chain.keys, until_s, owner=owner, kind=kind)
        self._keep_checkpoint(name)
        return kept

    def renew(self, name: str, until_s: float) -> None:
        self.keeper.renew(name, until_s)
        self._keep_checkpoint(name)

    def unpin(self, name: str) -> bool:
        found = self.keeper.unpin(name)
        self._keep_checkpoint(name)
        return found

    def _keep_checkpoint(self, name: str) -> None:
        """Have the checkpoint of a pin kept too, and no more those of pins that ended with it."""
        if self._checkpoints is None:
            return
        mine, theirs = self.keeper, self._checkpoints.keeper
        for other in theirs.pins():
            if mine.get(other.name) is None:
                theirs.unpin(other.name)
        pin = mine.get(name)
        if pin is not None:
            longest = [key for key in reversed(pin.keys) if theirs.holds(key)][:1]
            keys = list(dict.fromkeys([*longest, *pin.keys[: -1 - AT_END : -1]]))
            keys = keys[: theirs.max_blocks]
            theirs.retain(name, pin.scope, keys, pin.until_s, owner=pin.owner, kind=pin.kind)

    def pins(self) -> list[Pin[PrefixKey]]:
        return self.keeper.pins()

    def saved(self) -> "Future[None]":
        return self._saved

    def publish(self, chain: Chain) -> "Future[int] | None":
        if self._disk is None or not self._disk.is_shared or chain.private:
            return done(0)
        if [block for block in self.index.match(chain) if self._demoter.write_now(block)]:
            return None
        return self._disk.publish(chain.keys)

    def purge(self, roots: Collection[PrefixKey]) -> "Future[Purged]":
        purged = self.purger.start(roots)
        if self._checkpoints is not None:
            purged = with_checkpoints(purged, self._checkpoints.purge(roots))
        return purged

    def evict(self, keys: Sequence[PrefixKey]) -> "Future[dict[TierName, int]]":
        if self._checkpoints is not None:
            self._checkpoints.evict(keys)
        return self.evictions.evict(keys)

    def prefix_of(self, key: PrefixKey) -> "Future[KeyedPrefix]":
        found = trace(self._residency, self._mover, [key])
        return then(found, lambda blocks: _prefix(key, blocks))

    def quotas(self) -> list[GroupUse]:
        """What each group has in each tier. Empty without quotas."""
        usage = {tier: quotas.usage() for tier, quotas in self._quotas.items()}
        if self._disk is not None:
            usage[self._disk.name] = dict(self._disk.quotas())
        return [
            GroupUse(tier, group if isinstance(group, str) else None, used, share)
            for tier, groups in usage.items()
            for group, (used, share) in groups.items()
        ]

    def _most_owned(self, scope: PrefixKey) -> int | None:
        quotas = next(iter(self._quotas.values()), None)
        lowest = list(self._capacities.values())[-1]
        return quotas.shares.part_of(scope, self._pinned_share * lowest) if quotas else None

    def _save_pins(self, pins: Sequence[Pin[PrefixKey]]) -> None:
        folder = self._pin_folder
        if folder is not None:
            # Saves what is pinned when the writer gets to it, so that two saves cannot swap places.
            self._pins_now = tuple(pins)
            self._saved = ask_writer(self._mover, lambda _: save_pins(folder, self._pins_now), None)


def _prefix(key: PrefixKey, found: Mapping[PrefixKey, BlockId]) -> KeyedPrefix:
    """The prefix that ends with block `key`, without keys if a block before it was not found."""
    keys, scope = list[PrefixKey](), PrefixKey(b"")
    while (block := found.get(key)) is not None:
        keys.append(key)
        key, scope = block.parent, block.scope
        if key == scope:
            return KeyedPrefix(scope, keys[::-1])
    return KeyedPrefix(scope, [])
