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
from typing import Any

from cachesvc.server.vllm.node_prefixes import KeysByLayout, KvParts
from tiers.blocks.chain import Chain, KeyedPrefix
from tiers.blocks.keys import BlockId, PrefixKey
from tiers.blocks.layout import BlockLayout
from tiers.disk.pin_file import pin_of
from tiers.errors import NodeError
from tiers.node.client import NodeClient
from tiers.policy.retention import Pin, PinError
from tiers.tier import TierName

logger = logging.getLogger(__name__)

QUICK_S = 2.0  # for answers that the engine's thread waits for


class NodePins:
    """The pins of one engine's blocks in the node at `socket`."""

    def __init__(self, socket: Path, parts: KvParts) -> None:
        self._parts = parts
        self._nodes = {
            layout: NodeClient(socket, layout, timeout_s=QUICK_S) for layout in parts.layouts
        }
        self._shown: list[Pin[PrefixKey]] = []  # as last heard

    def pin(
        self, name: str, prefix: Chain | KeyedPrefix, for_s: float, why: str, owner: str
    ) -> Pin[PrefixKey]:
        """Pin every part of a prefix. Raises PinError, and then nothing has changed."""
        before = {layout: self._named(layout, name) for layout in self._nodes}
        wanted = self._keys(prefix, before)
        num_tokens = len(prefix.keys) * self._parts.groups[0].block_size
        made: list[BlockLayout] = []
        try:
            for layout, keys in wanted.items():
                scope = self._scope(layout, prefix.root)
                self._set(layout, name, scope, keys, for_s, why, owner, num_tokens)
                made.append(layout)
        except PinError:
            for layout in made:
                self._restore(layout, name, before[layout])
            raise
        return next(pin for pin in self.pins() if pin.name == name)

    def unpin(self, name: str) -> bool:
        found = [self._ask(layout, "unpin", name=name)["found"] for layout in self._nodes]
        return any(found)

    def pins(self) -> list[Pin[PrefixKey]]:
        """The node's pins, each with its blocks of the first group. While it is unreachable, the
        last known ones."""
        try:
            heard = [self._of(layout) for layout in self._nodes]
            self._shown = [self._whole(pin) for pin in heard[0]]
        except PinError as error:
            logger.warning(f"pins are shown as they were: {error}")
        return self._shown

    def close(self) -> None:
        for node in self._nodes.values():
            node.close()

    def _keys(
        self, prefix: Chain | KeyedPrefix, before: dict[BlockLayout, Pin[PrefixKey] | None]
    ) -> KeysByLayout:
        """The keys to pin in each layout. `before`: the pins of that name, which may be renewed."""
        if self._parts.are_one:
            return {self._parts.layouts[0]: list(prefix.keys)}
        if isinstance(prefix, Chain):
            return self._parts.prefix(prefix).keys_to_resume(self._held_until(time.monotonic()))
        first = before[self._parts.layouts[0]]
        if first is None or list(self._whole(first).keys) != list(prefix.keys):
            raise PinError(
                "the model has several kinds of KV or ranks, whose keys follow from the tokens; "
                "name the prefix by its prompt or messages"
            )
        return {layout: list(pin.keys) for layout, pin in before.items() if pin is not None}

    def _held_until(self, begun_s: float) -> Any:
        """What the node holds, asked for at most as long as one answer may take."""

        def held(layout: BlockLayout, run: Sequence[BlockId]) -> list[TierName]:
            if time.monotonic() > begun_s + QUICK_S:
                return []
            with self._node(layout) as node:
                return node.probe(run)

        return held

    def _scope(self, layout: BlockLayout, root: PrefixKey) -> PrefixKey:
        """The root of the first group of this layout on the first rank."""
        groups = zip(self._parts.groups, self._parts.roots(root), strict=True)
        return next(roots[0] for group, roots in groups if group.layout == layout)

    def _set(
        self,
        layout: BlockLayout,
        name: str,
        scope: PrefixKey,
        keys: Sequence[PrefixKey],
        for_s: float,
        why: str,
        owner: str,
        num_tokens: int,
    ) -> None:
        about = {"for_s": for_s, "why": why, "owner": owner, "num_tokens": num_tokens}
        hexed = [key.hex() for key in keys]
        answer = self._ask(layout, "pin", name=name, scope=scope.hex(), keys=hexed, **about)
        if "refused" in answer:
            raise PinError(answer["refused"], answer["excess"])

    def _restore(self, layout: BlockLayout, name: str, old: Pin[PrefixKey] | None) -> None:
        """Put back what `name` pinned before."""
        if old is None:
            self._ask(layout, "unpin", name=name)
            return
        for_s = old.until_s - self._ask(layout, "pins")["now_s"]
        self._set(layout, name, old.scope, old.keys, for_s, old.why, old.owner, old.num_tokens)

    def _whole(self, pin: Pin[PrefixKey]) -> Pin[PrefixKey]:
        """The pin with its blocks of the first group on the first rank alone."""
        num_blocks = pin.num_tokens // self._parts.groups[0].block_size
        return replace(pin, keys=pin.keys[:num_blocks])

    def _named(self, layout: BlockLayout, name: str) -> Pin[PrefixKey] | None:
        return next((pin for pin in self._of(layout) if pin.name == name), None)

    def _of(self, layout: BlockLayout) -> list[Pin[PrefixKey]]:
        return [pin_of(fields) for fields in self._ask(layout, "pins")["pins"]]

    def _ask(self, layout: BlockLayout, what: str, **about: Any) -> dict[str, Any]:
        with self._node(layout) as node:
            return node.operate(what, **about)

    @contextmanager
    def _node(self, layout: BlockLayout) -> Iterator[NodeClient]:
        """The connected node. A failure of it is a PinError."""
        node = self._nodes[layout]
        try:
            if not node.is_connected:
                node.connect()
            yield node
        except NodeError as error:
            node.close()
            raise PinError(f"the node keeps the pins, and does not answer: {error}") from error
