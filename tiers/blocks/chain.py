"""A sequence as the cache sees it: its tokens in block-sized chunks, each with its prefix key.

Owned by one sequence, on the engine thread. Grows as tokens are generated.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import xxhash

from tiers.blocks.keys import TOKEN_BYTES, BlockId, PrefixKey, token_bytes
from tiers.blocks.packing import cut_evenly, pack_blocks


class KeyedPrefix(NamedTuple):
    """A prefix of which only the root and the keys of its blocks are known."""

    root: PrefixKey
    keys: Sequence[PrefixKey]


class Chain:
    """Tokens of one sequence cut into full blocks, and a tail shorter than a block.

    Invariant: `keys[i]` names block i given everything before it, `chunks[i]` are its token bytes;
    the tail has no key. `contents[i]` are the digests of the content that block i covers.
    """

    __slots__ = ("_packed", "_step", "_tail", "chunks", "contents", "keys", "private", "root")

    def __init__(
        self,
        root: PrefixKey,
        tokens: Iterable[int],
        block_size: int,
        contents: Sequence[bytes] = (),
        *,
        private: bool = False,
    ) -> None:
        self.root = root
        self.contents = contents
        self.private = private  # neither served from the cache nor stored in it
        self._step = block_size * TOKEN_BYTES
        self._tail = bytearray()
        self.keys: list[PrefixKey] = []
        self.chunks: list[bytes] = []
        self._packed: list[bytes] = []  # of the first chunks, as far as requested
        self._cut(token_bytes(tokens))

    @property
    def num_tokens(self) -> int:
        return (len(self.chunks) * self._step + len(self._tail)) // TOKEN_BYTES

    @property
    def block_size(self) -> int:
        return self._step // TOKEN_BYTES

    @property
    def tail(self) -> bytes:
        """Token bytes after the last full block; empty if the tokens end on a block boundary."""
        return bytes(self._tail)

    def copy(self) -> "Chain":
        """A copy of the chain that can be continued differently."""
        twin = Chain(self.root, (), self.block_size, self.contents, private=self.private)
        twin.keys, twin.chunks = list(self.keys), list(self.chunks)
        twin._tail, twin._packed = bytearray(self._tail), list(self._packed)
        return twin

    def head(self, num_blocks: int) -> "Chain":
        """Its first full blocks alone."""
        head = Chain(self.root, (), self.block_size, self.contents, private=self.private)
        head.keys, head.chunks = self.keys[:num_blocks], self.chunks[:num_blocks]
        head._packed = self._packed[:num_blocks]
        return head

    def link(self, number: int) -> "Chain":
        """Full block `number` alone, as the continuation of the prefix before it."""
        link = _OneBlock(self.root, (), self.block_size, private=self.private)
        link.before = self.parent(number)
        link.keys, link.chunks = [self.keys[number]], [self.chunks[number]]
        if self.contents:
            link.contents = [self.content(number)]
        return link

    def append(self, token: int) -> None:
        """Appends a generated token. A block that it fills gets its key."""
        self._tail += token.to_bytes(TOKEN_BYTES, "little", signed=True)
        if len(self._tail) == self._step:
            chunk = bytes(self._tail)
            self._tail.clear()
            self._cut(chunk)

    @property
    def num_blocks(self) -> int:
        """Number of blocks, including a partly filled last one."""
        return len(self.chunks) + bool(self._tail)

    def parent(self, number: int) -> PrefixKey:
        """The key of the prefix that block `number` continues."""
        return self.keys[number - 1] if number else self.root

    def content(self, number: int) -> bytes:
        return self.contents[number] if number < len(self.contents) else b""

    def block_id(self, number: int) -> BlockId:
        return BlockId(
            self.root,
            self.parent(number),
            self.keys[number],
            self.chunks[number],
            self.content(number),
        )

    def packed(self) -> list[bytes]:
        """The packed ids of each full block; see `tiers.blocks.packing`."""
        known = len(self._packed)
        if known < len(self.chunks):
            self._packed += pack_blocks(b"".join(self.chunks[known:]), self.block_size)
        return self._packed

    def block_ids(self, start: int, end: int) -> list[BlockId]:
        return [self.block_id(number) for number in range(start, end)]

    def _cut(self, data: bytes) -> None:
        """Cuts `data`, which starts on a block boundary, into keyed chunks and the tail."""
        step, digest = self._step, xxhash.xxh3_128_digest
        keys = self.keys
        parent = keys[-1] if keys else self.root
        cut = cut_evenly(data, step)
        if self.contents:
            for number, chunk in enumerate(cut, len(keys)):
                parent = PrefixKey(digest(parent + chunk + self.content(number)))
                keys.append(parent)
        else:
            for chunk in cut:
                parent = digest(parent + chunk)  # type: ignore[assignment]
                keys.append(parent)
        self.chunks += cut
        self._tail += data[len(cut) * step :]


class _OneBlock(Chain):
    """A chain of one block that need not be the first of its scope."""

    __slots__ = ("before",)
    before: PrefixKey

    def parent(self, number: int) -> PrefixKey:
        return self.before
