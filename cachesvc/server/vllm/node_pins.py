"""Pins in a node, for a server with vLLM: one pin is set in the blocks of every layout.

The node keeps pins by layout. Each of them has the keys of all parts of the prefix with that
layout, and the first layout's begins with the blocks in which prefixes are counted. The engine's
thread only.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from cachesvc.server.vllm.node_prefixes import KeysByLayout, KvParts, KvPrefix, Nodes
from tiers.blocks.chain import Chain, KeyedPrefix
from tiers.blocks.keys import BlockId, PrefixKey
from tiers.blocks.layout import BlockLayout
from tiers.disk.pin_file import pin_fields, pin_of
from tiers.errors import NodeError
from tiers.policy.retention import Pin, PinError
from tiers.steady_clock import SteadyClock
from tiers.tier import TierName

logger = logging.getLogger(__name__)

QUICK_S = 2.0  # for answers that the engine's thread waits for


@contextmanager
def _refusals() -> Iterator[None]:
    """A failure of the node is a PinError."""
    try:
        yield
    except NodeError as error:
        raise PinError(f"the node keeps the pins, and does not answer: {error}") from error


class NodePins:
    """The pins of one engine's blocks in the node at `socket`."""

    def __init__(self, socket: Path, parts: KvParts) -> None:
        self._parts = parts
        self._nodes = Nodes(socket, QUICK_S)
        self._clock = SteadyClock()
        self._shown: list[Pin[PrefixKey]] = []  # as last heard

    @property
    def now_s(self) -> float:
        return self._clock()

    @_refusals()
    def pin(
        self,
        name: str,
        prefix: Chain | KeyedPrefix,
        until_s: float,
        why: str = "",
        *,
        owner: str = "",
    ) -> Pin[PrefixKey]:
        """Pin every part of a prefix. Raises PinError, and then nothing has changed."""
        before = {
            layout: next((pin for pin in self._of(layout) if pin.name == name), None)
            for layout in self._parts.layouts
        }
        num_tokens = len(prefix.keys) * self._parts.groups[0].block_size
        wanted: Pin[PrefixKey] = Pin(
            name=name, keys=(), until_s=until_s, num_tokens=num_tokens, why=why, owner=owner
        )
        made: list[BlockLayout] = []
        try:
            for layout, keys in self._keys(prefix, before).items():
                scope = self._scope(layout, prefix.root)
                self._set(layout, replace(wanted, keys=tuple(keys), scope=scope), self.now_s)
                made.append(layout)
        except (PinError, NodeError):
            for layout in made:
                self._restore(layout, name, before[layout])
            raise
        return next(pin for pin in self.pins() if pin.name == name)

    @_refusals()
    def unpin(self, name: str) -> bool:
        ended = [self._nodes[each].operate("unpin", name=name) for each in self._parts.layouts]
        return any(each["found"] for each in ended)

    def pins(self) -> list[Pin[PrefixKey]]:
        """The node's pins, each with its blocks of the first group. While it is unreachable, the
        last known ones."""
        try:
            heard = [self._of(layout) for layout in self._parts.layouts]
            self._shown = [self._whole(pin) for pin in heard[0]]
        except NodeError as error:
            logger.warning(f"pins are shown as they were: {error}")
        return self._shown

    def close(self) -> None:
        self._nodes.close()

    def _keys(
        self, prefix: Chain | KeyedPrefix, before: dict[BlockLayout, Pin[PrefixKey] | None]
    ) -> KeysByLayout:
        """The keys to pin in each layout. `before`: the pins of that name, which may be renewed."""
        first_layout = self._parts.layouts[0]
        if len(self._parts.groups) == self._parts.num_ranks == 1:  # these are all keys there are
            return {first_layout: list(prefix.keys)}
        if isinstance(prefix, Chain):
            begun_s = time.monotonic()

            def held(layout: BlockLayout, run: Sequence[BlockId]) -> list[TierName]:
                """Asked for at most as long as one answer may take."""
                late = time.monotonic() > begun_s + QUICK_S
                return [] if late else self._nodes.held(layout, run)

            return KvPrefix(self._parts, prefix).keys_to_resume(held)
        first = before[first_layout]
        if first is None or self._whole(first).keys != tuple(prefix.keys):
            raise PinError(
                "the model has several kinds of KV or ranks, whose keys follow from the tokens; "
                "name the prefix by its prompt or messages"
            )
        return {layout: list(pin.keys) for layout, pin in before.items() if pin is not None}

    def _scope(self, layout: BlockLayout, root: PrefixKey) -> PrefixKey:
        """The root of the first group of this layout on the first rank."""
        groups = zip(self._parts.groups, self._parts.roots(root), strict=True)
        return next(roots[0] for group, roots in groups if group.layout == layout)

    def _set(self, layout: BlockLayout, pin: Pin[PrefixKey], now_s: float) -> None:
        """Set a pin as it is, `now_s` by the clock of its end."""
        fields = pin_fields(pin) | {"for_s": pin.until_s - now_s}
        answer = self._nodes[layout].operate("pin", **fields)
        if "refused" in answer:
            raise PinError(answer["refused"], answer["excess"])

    def _restore(self, layout: BlockLayout, name: str, old: Pin[PrefixKey] | None) -> None:
        """Put back what `name` pinned before."""
        if old is None:
            self._nodes[layout].operate("unpin", name=name)
        else:
            self._set(layout, old, self._nodes[layout].operate("pins")["now_s"])

    def _whole(self, pin: Pin[PrefixKey]) -> Pin[PrefixKey]:
        """The pin with its blocks of the first group on the first rank alone."""
        num_blocks = pin.num_tokens // self._parts.groups[0].block_size
        return replace(pin, keys=pin.keys[:num_blocks])

    def _of(self, layout: BlockLayout) -> list[Pin[PrefixKey]]:
        return [pin_of(fields) for fields in self._nodes[layout].operate("pins")["pins"]]
