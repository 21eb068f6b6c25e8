"""The index of blocks in memory: by key, and by the prefix they continue.

Only the engine thread uses it, so it has no locks. Blocks that are only on disk are not here: their
index is the disk tier's own B-tree, which a reader thread queries.
"""

from collections.abc import Iterator

from tiers.blocks.chain import Chain
from tiers.blocks.keys import BlockId, PrefixKey
from tiers.blocks.packing import pack
from tiers.memory.block import Block, Following


class BlockIndex:
    """Blocks by key. A block stores its own continuations, because most have only one. Invariant: a
    block is here exactly while it has a key; at most one block has a given key."""

    def __init__(self) -> None:
        self._blocks: dict[PrefixKey, Block] = {}
        self._first: dict[PrefixKey, Following] = {}  # what continues a key that has no block here
        self._partials: dict[PrefixKey, list[Block]] = {}
        self._scopes: dict[PrefixKey, None] = {}
        self.collisions = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def get(self, key: PrefixKey) -> Block | None:
        return self._blocks.get(key)

    def match(self, chain: Chain, start: int = 0, end: int | None = None) -> list[Block]:
        """The run of held blocks from block `start` of the chain on, each verified against it.

        `[0, start)` must already be matched: identity is proven from the root, block by block.
        A block of another identity under the same key ends the run and is counted.
        """
        get = self._blocks.get
        keys, contents = chain.keys, chain.contents
        if start or end is not None:
            keys = keys[start:end]
        if not keys or get(keys[0]) is None:
            return []  # before anything is packed
        packed = chain.packed()
        blocks: list[Block] = []
        parent = chain.parent(start)
        for key, tokens in zip(keys, packed[start:] if start else packed, strict=False):
            block = get(key)
            if block is None:
                break
            if (
                block.parent != parent
                or block.packed != tokens
                or (
                    (contents or block.content)
                    and block.content != chain.content(start + len(blocks))
                )
            ):
                self.collisions += 1
                break
            blocks.append(block)
            parent = key
        return blocks

    def add(self, block: Block, chain: Chain, number: int) -> None:
        """Adds a block as full block `number` of the chain, whose key must be free."""
        self.insert(block, chain.block_id(number), chain.packed()[number], number)

    def insert(self, block: Block, identity: BlockId, packed: bytes, depth: int) -> None:
        """Adds a block under its key, which must be free. `packed` are its tokens."""
        key, blocks = identity.key, self._blocks
        assert key not in blocks, f"{key.hex()} is in the index already"
        block.name(identity, packed, depth)
        blocks[key] = block
        if self._first:
            block.following = self._first.pop(key, None)
        parent = blocks.get(identity.parent)
        if parent is not None:
            block.parent = parent.key  # the very same bytes
            parent.following = _joined(parent.following, block)
        else:
            self._first[identity.parent] = _joined(self._first.get(identity.parent), block)
            if identity.parent == identity.scope:
                self._scopes[identity.scope] = None

    def remove(self, block: Block) -> None:
        """Removes a block. Sequences may still hold it; it is private from now on."""
        key, above = block.key, block.parent
        assert key is not None and above is not None
        del self._blocks[key]
        if block.following is not None:
            self._first[key], block.following = block.following, None
        parent = self._blocks.get(above)
        if parent is not None:
            parent.following = _parted(parent.following, block)
        else:
            left = _parted(self._first[above], block)
            if left is not None:
                self._first[above] = left
            else:
                del self._first[above]
                self._left(above)
        block.key = None
        block.parent = None

    def children(self, key: PrefixKey) -> list[Block]:
        """Full blocks that continue the prefix `key` (a scope's root counts as one)."""
        parent = self._blocks.get(key)
        following = parent.following if parent is not None else self._first.get(key)
        if following is None:
            return []
        return [following] if isinstance(following, Block) else list(following)

    def scopes(self) -> list[PrefixKey]:
        """The roots that have blocks, oldest first."""
        return list(self._scopes)

    def _left(self, parent: PrefixKey) -> None:
        """The last block of one kind that continued `parent` is gone; it may have been a root."""
        if parent not in self._first and parent not in self._partials:
            self._scopes.pop(parent, None)

    # Partly filled blocks have no key of their own: they are found as continuations of a prefix.

    def partials(self, parent: PrefixKey) -> list[Block]:
        return self._partials.get(parent, [])

    def add_partial(self, block: Block, scope: PrefixKey, parent: PrefixKey, tokens: bytes) -> None:
        """Offers a partly filled block as a continuation of `parent`; `tokens` are its rows."""
        assert block.key is None and tokens
        block.scope, block.parent, block.packed = scope, parent, pack(tokens)
        self._partials.setdefault(parent, []).append(block)
        if parent == scope:
            self._scopes[scope] = None

    def remove_partial(self, block: Block) -> None:
        assert block.parent is not None
        siblings = self._partials[block.parent]
        siblings.remove(block)
        if not siblings:
            del self._partials[block.parent]
            self._left(block.parent)
        block.parent = None

    def forget(self, block: Block) -> None:
        """Withdraw a block of either kind, if it is here."""
        if block.key is not None:
            self.remove(block)
        elif block.parent is not None:
            self.remove_partial(block)

    def is_partial(self, block: Block) -> bool:
        return block.key is None and block.parent is not None

    @property
    def num_partials(self) -> int:
        return sum(map(len, self._partials.values()))

    def iter_partials(self) -> Iterator[Block]:
        for blocks in self._partials.values():
            yield from blocks


def _joined(following: Following, block: Block) -> Following:
    """Adds a continuation of a prefix, newest last."""
    if following is None:
        return block
    if isinstance(following, Block):
        return {following: None, block: None}
    following[block] = None
    return following


def _parted(following: Following, block: Block) -> Following:
    if following is block:
        return None
    assert isinstance(following, dict), f"{block} continues nothing here"
    del following[block]
    return next(iter(following)) if len(following) == 1 else following
