"""The messages between a node and its clients over the socket.

Every message is a length, an operation and a body, little-endian. A client sends one request at a
time and waits for an answer with the same operation. A run of blocks is named by its scope, the key
of the block before the first, and its tokens. The node computes the keys itself, so it never has to
trust a client's keys.

    HELLO    the block layout (JSON)        -> pool, frames, frames of a piece (JSON), memory file
    PROBE    a run of blocks                -> the tier of each block in the leading run held, and
                                               what loads from each tier cost
    LEASE    a run of blocks                -> frames of the leading run held, filled and kept
    RESERVE  a run of blocks                -> (position, frame) of each block to be written
    COMMIT   frames that were written       -> ()
    RELEASE  frames that were leased        -> ()
    FETCH    a run of blocks                -> no answer: what memory lacks is loaded, for a lease
    STATS    ()                             -> counters (JSON)
    OPERATE  what to do, and to which pool  -> the result (JSON): see `operations`
    LOCK     a piece of the memory          -> whether the client may lock it for its GPU
    PUBLISH  a run of blocks                -> how many are in the store that machines share (JSON)
"""

import json
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Any

from tiers.blocks.keys import TOKEN_BYTES, BlockId, PrefixKey, block_ids
from tiers.blocks.layout import ITEM_BYTES, BlockLayout, LayerLayout
from tiers.errors import NodeError
from tiers.tier import TierName
from tiers.transfer.economy import CostLine

HEADER = struct.Struct("<IB")  # bytes of the body, operation
MAX_BODY = 64 << 20
VERSION = 4
TIERS = tuple(tier for tier in TierName if tier is not TierName.DEVICE)  # by their number here
_RUN = struct.Struct("<B16s16sIII")  # pool, scope, parent, tokens of a block, blocks, content bytes
_CONTENT = struct.Struct("<IH")  # block, bytes
_PAIR = struct.Struct("<II")
_LINE = struct.Struct("<dd")  # seconds of a load from a tier: fixed, and for each byte


class Op(IntEnum):
    """The operation that a message requests or answers."""

    HELLO = 1
    PROBE = 2
    LEASE = 3
    RESERVE = 4
    COMMIT = 5
    RELEASE = 6
    STATS = 7
    REFUSED = 8  # an answer: the reason, as text
    OPERATE = 9
    PUBLISH = 10
    LOCK = 11
    FETCH = 12


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Consecutive blocks of one prompt. `contents[i]` holds the digests of content in block i."""

    scope: PrefixKey
    parent: PrefixKey
    tokens: bytes  # int32 little-endian, whole blocks
    block_size: int
    contents: Sequence[bytes] = ()

    def ids(self) -> list[BlockId]:
        """The identity of every block, with its key computed from the tokens."""
        return block_ids(
            self.scope, self.tokens, self.block_size, self.contents, parent=self.parent
        )


def engine_layout(num_layers: int, token_items: int, block_size: int, dtype: str) -> BlockLayout:
    """A block with `token_items` numbers, of which only the engine knows more."""
    layer = LayerLayout(num_heads=1, key_dim=token_items, value_dim=token_items, shared=True)
    return BlockLayout((layer,) * num_layers, block_size, dtype)


def state_layout(num_layers: int, state_items: int, block_size: int, dtype: str) -> BlockLayout:
    """A block with a state of `state_items` numbers per layer, as of the block's last token."""
    layer = LayerLayout(num_heads=1, key_dim=state_items, value_dim=0, shared=True, rows=1)
    return BlockLayout((layer,) * num_layers, block_size, dtype)


def describe_layout(layout: BlockLayout) -> dict[str, Any]:
    """The arguments of `engine_layout` or `state_layout` that make this layout."""
    items = "state_items" if layout.has_states else "token_items"
    return {
        "num_layers": len(layout.layers),
        items: layout.layers[0].row_items,
        "block_size": layout.block_size,
        "dtype": layout.dtype,
    }


def described_layout(fields: Any) -> BlockLayout:
    """The inverse of `describe_layout`. Raises NodeError for a layout that no engine can have."""
    is_state = isinstance(fields, dict) and "state_items" in fields
    items = "state_items" if is_state else "token_items"
    sizes = {"num_layers": 1 << 12, items: 1 << 24, "block_size": 1 << 20}
    if not isinstance(fields, dict) or set(fields) != {*sizes, "dtype"}:
        raise NodeError(f"a block layout has the fields {', '.join(sizes)} and dtype")
    for name, most in sizes.items():
        if type(fields[name]) is not int or not 0 < fields[name] <= most:
            raise NodeError(f"{name} of a block layout is {fields[name]!r}; at most {most}")
    if not isinstance(fields["dtype"], str) or fields["dtype"] not in ITEM_BYTES:
        raise NodeError(f"blocks of dtype {fields['dtype']!r} cannot be served")
    return state_layout(**fields) if is_state else engine_layout(**fields)


def run_of(ids: Sequence[BlockId]) -> TokenRun:
    """Consecutive identities as one run. Each must continue the one before."""
    assert all(before.key == after.parent for before, after in pairwise(ids)), "not a run"
    first = ids[0]
    return TokenRun(
        first.scope,
        first.parent,
        b"".join(block.tokens for block in ids),
        len(first.tokens) // TOKEN_BYTES,
        [block.content for block in ids],
    )


def pack(op: Op, body: bytes = b"") -> bytes:
    return HEADER.pack(len(body), op) + body


def pack_run(pool: int, run: TokenRun) -> bytes:
    contents = b"".join(
        _CONTENT.pack(number, len(content)) + content
        for number, content in enumerate(run.contents)
        if content
    )
    num_blocks = len(run.tokens) // (run.block_size * TOKEN_BYTES)
    head = _RUN.pack(pool, run.scope, run.parent, run.block_size, num_blocks, len(contents))
    return head + contents + run.tokens


def unpack_run(body: memoryview) -> tuple[int, TokenRun]:
    """The inverse of `pack_run`. Raises NodeError for a malformed body."""
    if len(body) < _RUN.size:
        raise NodeError(f"a run of blocks has {len(body)} bytes, fewer than its head")
    pool, scope, parent, block_size, num_blocks, content_bytes = _RUN.unpack_from(body)
    tokens_at = _RUN.size + content_bytes
    if len(body) != tokens_at + num_blocks * block_size * TOKEN_BYTES or not block_size:
        raise NodeError(f"a run of {num_blocks} blocks does not fit a body of {len(body)} bytes")
    contents = _contents(body[_RUN.size : tokens_at], num_blocks)
    tokens = bytes(body[tokens_at:])
    return pool, TokenRun(PrefixKey(scope), PrefixKey(parent), tokens, block_size, contents)


def _contents(body: memoryview, num_blocks: int) -> list[bytes]:
    contents = [b""] * num_blocks if len(body) else []
    at = 0
    while at < len(body):
        if at + _CONTENT.size > len(body):
            raise NodeError("the contents of a run are cut short")
        number, size = _CONTENT.unpack_from(body, at)
        at += _CONTENT.size
        if number >= num_blocks or at + size > len(body):
            raise NodeError(f"content of block {number} does not fit a run of {num_blocks} blocks")
        contents[number] = bytes(body[at : at + size])
        at += size
    return contents


def pack_numbers(numbers: Iterable[int]) -> bytes:
    return array("I", numbers).tobytes()


def unpack_numbers(body: bytes | memoryview) -> "array[int]":
    if len(body) % 4:
        raise NodeError(f"{len(body)} bytes are not a list of frames")
    numbers = array("I")
    numbers.frombytes(bytes(body))
    return numbers


def pack_pairs(pairs: Iterable[tuple[int, int]]) -> bytes:
    return b"".join(_PAIR.pack(*pair) for pair in pairs)


def unpack_pairs(body: bytes) -> list[tuple[int, int]]:
    return list(_PAIR.iter_unpack(body))


def pack_held(tiers: Iterable[TierName], loads: Mapping[TierName, CostLine]) -> bytes:
    """The tiers of a run, after what a load from each costs."""
    lines = b"".join(_LINE.pack(*loads.get(tier, CostLine())) for tier in TIERS)
    return lines + bytes(map(TIERS.index, tiers))


def unpack_held(body: bytes) -> tuple[list[TierName], dict[TierName, CostLine]]:
    tiers_at = len(TIERS) * _LINE.size
    lines = map(CostLine._make, _LINE.iter_unpack(body[:tiers_at]))
    return [TIERS[code] for code in body[tiers_at:]], dict(zip(TIERS, lines, strict=True))


def pack_json(document: Any) -> bytes:
    return json.dumps(document).encode()


def unpack_json(body: bytes | memoryview) -> dict[str, Any]:
    """Parse a JSON object. Raises NodeError for anything else."""
    try:
        document = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise NodeError(f"a message that is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise NodeError("a message that is not a JSON object")
    return document
