"""The one truth about where a block is, while it is on the device or the host.

Used by the engine thread alone, so it has no locks. Blocks that are only on disk are not here:
the disk tier's own B-tree is their index, asked by a reader thread.
"""

import time
from collections.abc import Iterator
from enum import IntEnum

from tiers.blocks.chain import Chain
from tiers.blocks.frames import Frame
from tiers.blocks.keys import TOKEN_BYTES, BlockId, PrefixKey
from tiers.errors import MissReason
from tiers.policy import Use

NEVER_USED = Use(time_s=0.0, num_blocks=0)


class BlockState(IntEnum):
    """Whether the KV of a block stands."""

    COMPUTING = 0  # a running sequence is filling it
    LOADING = 1  # a reader thread is filling its frame
    READY = 2
    LOST = 3  # its load failed; out of the index, and `fault` says why


class Below(IntEnum):
    """Whether the tiers below memory hold a block. Each use lets it be written there once."""

    ABSENT = 0
    REFUSED = 1  # written since its last use, and not held: not to be written before its next one
    WRITING = 2  # the writer thread reads its frame
    HELD = 3  # not used since it was written
    HELD_USED = 4  # used since: should they drop it, it may be written again


AFTER_USE = (Below.ABSENT, Below.ABSENT, Below.WRITING, Below.HELD_USED, Below.HELD_USED)
AFTER_DROP = (Below.ABSENT, Below.REFUSED, Below.WRITING, Below.REFUSED, Below.ABSENT)


class Block:
    """One block's identity and whereabouts.

    Invariants: `pins` counts the sequences and tickets that need it; a pinned block keeps its
    KV somewhere above the disk. `busy` counts threads and streams that use the frame's bytes.
    A block whose `tokens` are shorter than a block is partial: rows past them are not KV.
    A block with `key` None belongs to one sequence and is not in the index.
    """

    __slots__ = (
        "below", "busy", "content", "created_s", "depth", "device_since_s", "fault", "frame",
        "hits", "host_held", "host_since_s", "kept", "key", "lent", "parent", "pins", "ranked",
        "scope", "slot", "state", "tokens", "use", "writer",
    )  # fmt: skip

    def __init__(self, slot: int | None = None) -> None:
        self.scope: PrefixKey | None = None
        self.parent: PrefixKey | None = None
        self.key: PrefixKey | None = None
        self.tokens = b""
        self.content = b""
        self.depth = 0
        self.slot = slot
        self.frame: Frame | None = None
        self.below = Below.ABSENT
        self.state = BlockState.COMPUTING
        self.pins = 0
        self.busy = 0
        self.hits = 0
        self.fault: MissReason | None = None
        self.ranked = False  # the device policy knows it
        self.host_held = False  # the host policy was told to hold it
        self.kept = False  # an operator pinned its prefix: it leaves last, and is never lost
        self.lent = False  # promoted from a host that gives its copy up before others
        self.created_s = time.monotonic()
        self.device_since_s = self.host_since_s = self.created_s  # when its KV came to stand there
        self.use: Use = NEVER_USED
        self.writer: Chain | None = None  # whose sequence appends rows to it; the others copy

    def name(self, identity: BlockId, depth: int) -> None:
        """Give the block its identity; it is about to enter the index."""
        self.scope, self.parent, self.key, self.tokens, self.content = identity
        self.depth = depth

    def identity(self) -> BlockId:
        assert self.scope is not None and self.parent is not None and self.key is not None
        return BlockId(self.scope, self.parent, self.key, self.tokens, self.content)

    @property
    def held_below(self) -> bool:
        """Whether the block stands in a tier under memory, so that memory may drop it."""
        return self.below >= Below.HELD

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    def __repr__(self) -> str:
        key = self.key.hex()[:8] if self.key else "private"
        where = f"slot={self.slot} frame={self.frame.number if self.frame else None}"
        return f"<Block {key} depth={self.depth} {self.state.name} {where} pins={self.pins}>"


class BlockIndex:
    """Blocks by key, and their children by parent key.

    Invariant: a block is here exactly while it has a key; at most one block has a given key.
    """

    def __init__(self) -> None:
        self._blocks: dict[PrefixKey, Block] = {}
        self._children: dict[PrefixKey, dict[PrefixKey, Block]] = {}
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
        """The run of blocks held, from block `start` of the chain, each verified against it.

        `[0, start)` must already be matched: identity is proven from the root, block by block.
        A block of another identity under the same key ends the run and is counted.
        """
        get = self._blocks.get
        blocks: list[Block] = []
        keys = chain.keys if end is None else chain.keys[:end]
        chunks, contents = chain.chunks, chain.contents
        parent = chain.parent(start)
        for number in range(start, len(keys)):
            key = keys[number]
            block = get(key)
            if block is None:
                break
            if (
                block.parent != parent
                or block.tokens != chunks[number]
                or ((contents or block.content) and block.content != chain.content(number))
            ):
                self.collisions += 1
                break
            blocks.append(block)
            parent = key
        return blocks

    def add(self, block: Block, identity: BlockId, depth: int) -> None:
        """Enter a block under its key, which must be free."""
        assert identity.key not in self._blocks, f"{identity.key.hex()} is in the index already"
        block.name(identity, depth)
        self._blocks[identity.key] = block
        self._children.setdefault(identity.parent, {})[identity.key] = block
        if identity.parent == identity.scope:
            self._scopes[identity.scope] = None

    def remove(self, block: Block) -> None:
        """Take a block out; it may be held by sequences still, and is private from here on."""
        assert block.key is not None and block.parent is not None
        del self._blocks[block.key]
        siblings = self._children[block.parent]
        del siblings[block.key]
        if not siblings:
            del self._children[block.parent]
            self._left(block.parent)
        block.key = None
        block.parent = None

    def children(self, key: PrefixKey) -> list[Block]:
        """Full blocks that continue the prefix `key` (a scope's root counts as one)."""
        return list(self._children.get(key, {}).values())

    def scopes(self) -> list[PrefixKey]:
        """The roots under which there are blocks, the longest known first."""
        return list(self._scopes)

    def _left(self, parent: PrefixKey) -> None:
        """The last block of one kind that continued `parent` is gone; it may have been a root."""
        if parent not in self._children and parent not in self._partials:
            self._scopes.pop(parent, None)

    # Partly filled blocks have no key of their own: they are found as continuations of a prefix.

    def partials(self, parent: PrefixKey) -> list[Block]:
        """Partly filled blocks that continue the prefix `parent`."""
        return self._partials.get(parent, [])

    def add_partial(self, block: Block, scope: PrefixKey, parent: PrefixKey, tokens: bytes) -> None:
        """Offer a partly filled block as a continuation of `parent`; `tokens` are its rows."""
        assert block.key is None and tokens
        block.scope, block.parent, block.tokens = scope, parent, tokens
        self._partials.setdefault(parent, []).append(block)
        if parent == scope:
            self._scopes[scope] = None

    def remove_partial(self, block: Block) -> None:
        """Withdraw a partly filled block."""
        assert block.parent is not None
        siblings = self._partials[block.parent]
        siblings.remove(block)
        if not siblings:
            del self._partials[block.parent]
            self._left(block.parent)
        block.parent = None

    def is_partial(self, block: Block) -> bool:
        return block.key is None and block.parent is not None

    @property
    def num_partials(self) -> int:
        return sum(map(len, self._partials.values()))

    def iter_partials(self) -> Iterator[Block]:
        for blocks in self._partials.values():
            yield from blocks
