"""Pins in the running cache: prefixes that an operator keeps until a moment, in at least one tier.

    lowest tier is the disk   written there at once, neither evicted nor expired from it; above it
                              pinned blocks leave after all others
    lowest tier is the host   not evicted from there; a device block finds a frame there first

A pinned block that stands nowhere yet is kept from the moment it is computed. What may be lost all
the same: blocks that could not be written yet, since the disk fails or is behind, when the memory
above has to go to a running request; they are counted as lost. Engine thread only; times are Unix
seconds.
"""

import logging
from collections.abc import Callable, Collection, Sequence

from tiers.blocks.keys import PrefixKey
from tiers.memory.index import Block, BlockState
from tiers.memory.residency import Residency
from tiers.policy.retention import Pin, PinError, Pins

logger = logging.getLogger(__name__)

TICK_S = 1.0  # how often expiries are looked at, and blocks that are still to be written


class Keeper:
    """Owns the pins. `changed` is told the pins after each change, to save them."""

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
    ) -> None:
        """`write` hurries a block to the tier below; `keep_below` names what that must keep."""
        self._residency = residency
        self._block_tokens = block_tokens
        self._write = write
        self._keep_below = keep_below
        self._changed = changed
        self._clock = clock
        self._pins: Pins[PrefixKey] = Pins(max_blocks)
        self._next_tick_s = 0.0
        residency.kept_keys = self._pins

    def restore(self, pins: Sequence[Pin[PrefixKey]]) -> None:
        """Put pins of an earlier run in force again, as far as they are allowed now."""
        for pin in pins:
            if pin.until_s > self._clock():
                try:
                    self._pins.put(pin)
                except PinError as error:  # the tier or its pinned share was made smaller
                    logger.warning(f"the pin {pin.name!r} is not in force any more: {error}")
        self._keep_below(self._pins.keys())

    def pins(self) -> list[Pin[PrefixKey]]:
        return self._pins.pins()

    @property
    def num_blocks(self) -> int:
        """Blocks that are pinned, wherever they stand."""
        return self._pins.num_blocks

    @property
    def max_blocks(self) -> int:
        return self._pins.max_blocks

    def pin(
        self, name: str, scope: PrefixKey, keys: Sequence[PrefixKey], until_s: float, why: str
    ) -> Pin[PrefixKey]:
        """Pin a prefix, or replace the pin of that name. Raises PinError and changes nothing."""
        now_s = self._clock()
        if not keys:
            raise PinError("the prefix is shorter than one block; there is nothing to pin")
        if until_s <= now_s:
            raise PinError(f"the pin {name!r} would end in the past; choose a later moment")
        old = next((pin for pin in self.pins() if pin.name == name), None)
        same = old is not None and old.keys == tuple(keys)
        pin = Pin(
            name=name,
            keys=tuple(keys),
            until_s=until_s,
            since_s=old.since_s if old is not None and same else now_s,
            scope=scope,
            num_tokens=len(keys) * self._block_tokens,
            why=why,
        )
        self._apply(*self._pins.put(pin))
        return pin

    def unpin(self, name: str) -> bool:
        """End a pin; whether there was one."""
        if all(pin.name != name for pin in self.pins()):
            return False
        self._apply([], self._pins.unpin(name))
        return True

    def unpin_scopes(self, roots: Collection[PrefixKey]) -> list[str]:
        """End every pin of these scopes; returns their names."""
        names = [pin.name for pin in self.pins() if pin.scope in roots]
        for name in names:
            self.unpin(name)
        return names

    def step(self) -> None:
        """Let pins expire, and write what is kept and still stands in memory alone."""
        now_s = self._clock()
        if now_s < self._next_tick_s or not self._pins.num_blocks:
            return
        self._next_tick_s = now_s + TICK_S
        over = self._pins.expire(now_s)
        if over is not None:
            self._apply([], over)
        for block in self._resident(self._pins.keys()):
            if not block.held_below:
                self._write(block)

    def _apply(self, held: Sequence[PrefixKey], released: Sequence[PrefixKey]) -> None:
        residency = self._residency
        self._keep_below(self._pins.keys())
        for block in self._resident(released):
            residency.unkeep(block)
        for block in self._resident(held):
            residency.keep(block)
            self._write(block)
        self._changed(self.pins())

    def _resident(self, keys: Collection[PrefixKey]) -> list[Block]:
        found = (self._residency.index.get(key) for key in keys)
        return [b for b in found if b is not None and b.state is BlockState.READY]
