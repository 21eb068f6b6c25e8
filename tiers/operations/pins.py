"""Pins in the running cache: prefixes kept in at least one tier until a given time.

    lowest tier is the disk   written there at once and never evicted or expired from it; above it
                              pinned blocks leave after all others
    lowest tier is the host   not evicted from there; a device block finds a frame there first

A pinned block that no tier has yet is kept from the moment it is computed. A block can still be
lost if the disk fails or is behind, and a running request needs its memory before it is written.
Such blocks are counted as lost.

Pins in passing (breakpoints, sessions) come with every turn of a conversation. Their blocks are
written in their turn. The disk is told of them, and they are saved, at most once a second. They
give way to later pins of their owner. Sessions are not saved. Engine thread only. Times are Unix
seconds.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from tiers.blocks.keys import PrefixKey
from tiers.memory.block import Block
from tiers.memory.residency import Residency
from tiers.policy.retention import Pin, PinError, PinKind, Pins

logger = logging.getLogger(__name__)

TICK_S = 1.0  # how often expiries and unwritten blocks are checked
MAX_IN_PASSING = 256  # pins in passing of one owner; those that end soonest go first
MAX_CACHES = 64  # named caches of one owner


class Keeper:
    """Owns the pins. `changed` receives the pins to save when a change must survive a restart."""

    def __init__(
        self,
        residency: Residency,
        *,
        max_blocks: int,
        block_tokens: int,
        write: Callable[[Block], bool],
        keep_below: Callable[[Collection[PrefixKey]], None],
        changed: Callable[[Sequence[Pin[PrefixKey]]], None],
        clock: Callable[[], float],
        most_owned: Callable[[PrefixKey], int | None] = lambda scope: None,
    ) -> None:
        """`write` sends a block to the tier below early. `keep_below` names the blocks which that
        tier must keep. `most_owned` tells how many blocks the owner of a scope may pin, if it has a
        quota."""
        self._residency = residency
        self._block_tokens = block_tokens
        self._write = write
        self._keep_below = keep_below
        self._changed = changed
        self.clock = clock
        self._most_owned = most_owned
        self._pins: Pins[PrefixKey] = Pins(max_blocks)
        self._next_tick_s = 0.0
        self._untold = False  # whether pins in passing have changed since the disk was told
        residency.pinned_keys = self._pins

    def restore(self, pins: Sequence[Pin[PrefixKey]]) -> None:
        """Restore the pins of an earlier run, as far as they are still allowed. A pin that a wrong
        clock set in the future lasts no longer than its original duration."""
        now_s = self.clock()
        for saved in pins:
            pin = saved
            if pin.since_s > now_s + TICK_S:
                pin = replace(pin, until_s=min(pin.until_s, now_s + pin.until_s - pin.since_s))
            if pin.until_s > now_s:
                try:
                    self._pins.put(pin, self._most_owned(pin.scope))
                except PinError as error:  # the tier or its pinned share has been made smaller
                    logger.warning(f"the pin {pin.name!r} is not in force any more: {error}")
        self._tell_below()

    def pins(self) -> list[Pin[PrefixKey]]:
        return self._pins.pins()

    @property
    def num_blocks(self) -> int:
        return self._pins.num_blocks

    def get(self, name: str) -> Pin[PrefixKey] | None:
        return self._pins.get(name)

    def holds(self, key: PrefixKey) -> bool:
        """Whether memory has this block."""
        return self._residency.ready(key) is not None

    @property
    def max_blocks(self) -> int:
        return self._pins.max_blocks

    def pin(
        self,
        name: str,
        scope: PrefixKey,
        keys: Sequence[PrefixKey],
        until_s: float,
        why: str,
        *,
        owner: str = "",
        num_tokens: int | None = None,
    ) -> Pin[PrefixKey]:
        """Pin a prefix for an operator or as a tenant's cache. Replaces a pin of the same name.

        `num_tokens`: of the prefix, if `keys` are not each a block of it, as with several groups.
        Pins in passing give way. Raises PinError, and then nothing has changed.
        """
        kind = PinKind.CACHE if owner else PinKind.OPERATOR
        pin = self._made(name, scope, keys, until_s, why, owner, kind)
        if num_tokens is not None:
            pin = replace(pin, num_tokens=num_tokens)
        caches = [other for other in self._pins.of_owner(owner) if not other.kind.gives_way]
        if owner and self._pins.get(name) is None and len(caches) >= MAX_CACHES:
            raise PinError(f"{owner!r} has {MAX_CACHES} caches, as many as are kept; delete one")
        released = self._put(pin, self._giving_way(owner))
        self._apply(pin.keys, released)
        for block in self._resident(pin.keys):
            self._write(block)
        self._tell()
        return pin

    def retain(
        self,
        name: str,
        scope: PrefixKey,
        keys: Sequence[PrefixKey],
        until_s: float,
        *,
        owner: str,
        kind: PinKind,
    ) -> int:
        """Pin a prefix in passing, or as much of it as its owner may. Returns the number of blocks.
        It replaces the owner's pins in passing that this prefix continues."""
        if not keys or until_s <= self.clock():
            return 0
        mine = self._giving_way(owner)
        standing = frozenset(keys)
        gone: list[PrefixKey] = []
        for old in mine:
            if old.kind is kind and old.until_s <= until_s and old.keys[-1] in standing:
                gone += self._pins.unpin(old.name)
        mine = [old for old in mine if self._pins.get(old.name) is not None and old.name != name]
        for old in mine[: max(0, len(mine) + 1 - MAX_IN_PASSING)]:
            gone += self._pins.unpin(old.name)
        kept = 0
        for num_blocks in (len(keys), len(keys) // 2, len(keys) // 4):
            if not num_blocks:
                break
            pin = self._made(name, scope, keys[:num_blocks], until_s, "", owner, kind)
            try:
                released = self._put(pin, mine)
            except PinError:
                continue
            self._apply(pin.keys, [*gone, *released])
            gone, kept = [], num_blocks
            break
        self._apply([], gone)
        self._untold = self._untold or kind is not PinKind.SESSION or bool(gone)
        return kept

    def renew(self, name: str, until_s: float) -> None:
        """Extend the pin in passing of that name, if there is one, to `until_s` at least."""
        pin = self._pins.get(name)
        if pin is not None and pin.kind.gives_way and pin.until_s < until_s:
            self._pins.unpin(name)
            self._pins.restore(replace(pin, until_s=until_s))

    def unpin(self, name: str) -> bool:
        pin = self._pins.get(name)
        if pin is None:
            return False
        self._apply([], self._pins.unpin(name))
        if pin.kind is not PinKind.SESSION:
            self._tell()
        return True

    def unpin_scopes(self, roots: Collection[PrefixKey]) -> list[str]:
        """End every pin of these scopes. Returns their names."""
        names = [pin.name for pin in self.pins() if pin.scope in roots]
        for name in names:
            self.unpin(name)
        return names

    def step(self) -> None:
        """Let pins expire, and write pinned blocks that only memory holds."""
        if not (self._pins.num_blocks or self._untold):
            return
        now_s = self.clock()
        if now_s < self._next_tick_s:
            return
        self._next_tick_s = now_s + TICK_S
        over = self._pins.expire(now_s)
        if over is not None:
            self._apply([], over)
        if over is not None or self._untold:
            self._tell()
        hurried = (pin for pin in self._pins.pins() if not pin.kind.gives_way)
        for block in self._resident({key: None for pin in hurried for key in pin.keys}):
            if not block.held_below:
                self._write(block)

    def _made(
        self,
        name: str,
        scope: PrefixKey,
        keys: Sequence[PrefixKey],
        until_s: float,
        why: str,
        owner: str,
        kind: PinKind,
    ) -> Pin[PrefixKey]:
        now_s = self.clock()
        if not keys:
            raise PinError("the prefix is shorter than one block; there is nothing to pin")
        if until_s <= now_s:
            raise PinError(f"the pin {name!r} would end in the past; choose a later moment")
        old = self._pins.get(name)
        same = old is not None and old.keys == tuple(keys)
        return Pin(
            name=name,
            keys=tuple(keys),
            until_s=until_s,
            since_s=old.since_s if old is not None and same else now_s,
            scope=scope,
            num_tokens=len(keys) * self._block_tokens,
            why=why,
            owner=owner,
            kind=kind,
        )

    def _giving_way(self, owner: str) -> list[Pin[PrefixKey]]:
        """The pins that give way to this owner's, soonest end first; all to an operator's."""
        passing = [pin for pin in self._pins.pins() if pin.kind.gives_way]
        mine = [pin for pin in passing if owner in ("", pin.owner)]
        return sorted(mine, key=lambda pin: pin.until_s)

    def _put(self, pin: Pin[PrefixKey], giving_way: Sequence[Pin[PrefixKey]]) -> list[PrefixKey]:
        """Add a pin and end as many of `giving_way` as needed. Returns the keys to release. Raises
        PinError, and then nothing has changed."""
        most = self._most_owned(pin.scope) if pin.owner else None
        gone: list[Pin[PrefixKey]] = []
        released: list[PrefixKey] = []
        waiting = iter(giving_way)
        while True:
            try:
                more = self._pins.put(pin, most)
                return [key for key in (*released, *more) if key not in self._pins]
            except PinError as error:
                enough = len(released) + error.excess
                for old in waiting:
                    gone.append(old)
                    released += self._pins.unpin(old.name)
                    if len(released) >= enough:
                        break
                else:
                    for old in gone:
                        self._pins.restore(old)
                    raise

    def _apply(self, prefix: Sequence[PrefixKey], released: Sequence[PrefixKey]) -> None:
        """Pin the blocks of a prefix, tail first, and release those that no pin has any more."""
        for block in self._resident(released):
            if block.key not in self._pins:
                self._residency.unpin(block)
        for block in reversed(self._resident(prefix)):
            self._residency.pin(block)

    def _tell(self) -> None:
        self._tell_below()
        self._changed([pin for pin in self.pins() if pin.kind is not PinKind.SESSION])

    def _tell_below(self) -> None:
        """Tell the disk which keys to keep. Sessions keep their place in its order."""
        self._untold = False
        lasting = (pin for pin in self.pins() if pin.kind is not PinKind.SESSION)
        self._keep_below(list({key: None for pin in lasting for key in pin.keys}))

    def _resident(self, keys: Collection[PrefixKey]) -> list[Block]:
        found = (self._residency.ready(key) for key in keys)
        return [block for block in found if block is not None]
