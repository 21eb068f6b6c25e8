"""Prefix keys: the identity of a block of tokens, given everything before it.

A key is 16 bytes of xxh3_128 over the parent's key, the block's token ids (int32, little-endian)
and, where the block covers content beyond tokens, that content's digests. The root of every chain
is the digest of the `CacheScope`. Keys are the same in every process and on every machine;
`tests/unit/test_keys.py` checks golden values. The hash finds a block but proves nothing: see
`BlockId`.
"""

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, NewType

import xxhash

PrefixKey = NewType("PrefixKey", bytes)

KEY_BYTES = 16
TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class CacheScope:
    """Everything besides tokens that determines a token's KV and who may see it.

    Two requests share blocks only if all of these are equal. Values are opaque bytes. The server
    computes them itself and never takes them from a request body.
    """

    weights: bytes = b""
    tokenizer: bytes = b""
    adapter: bytes = b""
    layout: bytes = b""
    tenant: bytes = b""
    content: bytes = b""
    arithmetic: bytes = b""  # what the bits of a block depend on: `engine.models.arithmetic`

    def root(self) -> PrefixKey:
        """The root key: xxh3_128 over tagged, length-prefixed fields, so different scopes never
        encode alike. A scope without `arithmetic` has the root of the versions that knew none."""
        hasher = xxhash.xxh3_128(b"cachesvc.scope.v1")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "arithmetic" and not value:
                continue
            hasher.update(field.name.encode() + b"\0" + len(value).to_bytes(8, "little") + value)
        return PrefixKey(hasher.digest())


class BlockId(NamedTuple):
    """A block's complete identity. A hit in any tier requires every field to be equal.

    Checked block by block from the root, equality here is equality of the whole prefix, independent
    of the hash. Different fields under an equal key are a collision, which is a miss.
    """

    scope: PrefixKey  # root key of the chain
    parent: PrefixKey  # key of the block before, or the root
    key: PrefixKey
    tokens: bytes  # int32 little-endian ids, exactly block_size of them
    content: bytes = b""  # digests of the content behind these tokens


def token_bytes(tokens: Iterable[int]) -> bytes:
    """Token ids as int32 little-endian bytes, the form in which they are hashed and compared."""
    packed = tokens if isinstance(tokens, array) and tokens.typecode == "i" else array("i", tokens)
    if sys.byteorder == "big":
        packed = array("i", packed)
        packed.byteswap()
    return packed.tobytes()


def token_ids(tokens: bytes) -> list[int]:
    """The inverse of `token_bytes`."""
    packed = array("i", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


def child_key(parent: PrefixKey, tokens: bytes, content: bytes = b"") -> PrefixKey:
    """The key of the block with `tokens` after the prefix `parent`."""
    return PrefixKey(xxhash.xxh3_128_digest(parent + tokens + content))


def prefix_keys(root: PrefixKey, tokens: bytes, block_size: int) -> list[PrefixKey]:
    """Keys of the full blocks of `tokens` (int32 bytes), in order. A partial one has none."""
    step = block_size * TOKEN_BYTES
    digest = xxhash.xxh3_128_digest
    keys: list[PrefixKey] = []
    parent = root
    for start in range(0, len(tokens) - step + 1, step):
        parent = PrefixKey(digest(parent + tokens[start : start + step]))
        keys.append(parent)
    return keys


def block_ids(
    root: PrefixKey,
    tokens: bytes,
    block_size: int,
    contents: Sequence[bytes] = (),
    *,
    parent: PrefixKey | None = None,
) -> list[BlockId]:
    """Identities of the full blocks of `tokens`, after the prefix `parent` (None: the first of the
    scope). `contents[i]` covers block i (default none)."""
    step = block_size * TOKEN_BYTES
    ids: list[BlockId] = []
    parent = parent or root
    for number, start in enumerate(range(0, len(tokens) - step + 1, step)):
        chunk = tokens[start : start + step]
        content = contents[number] if number < len(contents) else b""
        key = child_key(parent, chunk, content)
        ids.append(BlockId(root, parent, key, chunk, content))
        parent = key
    return ids
