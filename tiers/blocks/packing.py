"""Compact token ids, as resident blocks store them.

Ids are hashed, sent and stored as int32. With a vocabulary below 65,536, half of that is zeros, and
ids would be two fifths of a block's memory besides its KV. The packed form is one byte for the
width of an id, then the lower halves of all ids, little-endian, then their upper parts:

    width 2   | 2 | low low low ... |
    width 3   | 3 | low low low ... | high high high ... |    one byte each
    width 4   | 4 | low low low ... | high high high ... |    two bytes each

The width follows from a block's ids alone, so equal ids have equal bytes, and two blocks are
compared in one call.
"""

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiers.blocks.keys import TOKEN_BYTES

LOW_BYTES = 2
NARROW, MIDDLE = 1 << 16, 1 << 24  # the first ids that need one more byte
_TWO, _FOUR = np.dtype("<u2"), np.dtype("<u4")
_HIGH: dict[int, np.dtype[Any]] = {3: np.dtype("u1"), 4: _TWO}  # upper part of an id


def pack(tokens: bytes) -> bytes:
    return pack_blocks(tokens, len(tokens) // TOKEN_BYTES)[0] if tokens else b"\2"


def pack_blocks(tokens: bytes, block_size: int) -> Sequence[bytes]:
    """The int32 ids of whole blocks, each block packed."""
    ids = np.frombuffer(tokens, _FOUR).reshape(-1, block_size)
    if not ids.size:
        return ()
    if np.maximum.reduce(ids, axis=None) < NARROW:  # always so for many models, hence a fast path
        return _packed(ids, LOW_BYTES)
    largest = ids.max(axis=1)
    packed = list(_packed(ids, 3 if largest.max() < MIDDLE else 4))
    for width, limit in ((3, MIDDLE), (2, NARROW)):
        narrower = np.flatnonzero(largest < limit)
        if len(narrower) and packed[narrower[0]][0] > width:
            for number, block in zip(narrower, _packed(ids[narrower], width), strict=True):
                packed[number] = block
    return packed


def unpack(packed: bytes) -> bytes:
    """The int32 ids."""
    width, count = packed[0], num_packed(packed)
    ids = np.frombuffer(packed, _TWO, count, offset=1).astype(_FOUR)
    if width > LOW_BYTES:
        high = np.frombuffer(packed, _HIGH[width], count, offset=1 + count * LOW_BYTES)
        ids |= high.astype(_FOUR) << 16
    return ids.tobytes()


def num_packed(packed: bytes) -> int:
    return (len(packed) - 1) // packed[0]


def may_begin(packed: bytes, tokens: bytes) -> bool:
    """Whether the first id may equal that of these int32 ids, without unpacking."""
    return packed[1 : 1 + LOW_BYTES] == tokens[:LOW_BYTES]


def low_halves(tokens: bytes) -> bytes:
    """Of int32 ids, as packed forms begin with them."""
    return np.frombuffer(tokens, _FOUR).astype(_TWO).tobytes()


def may_share(packed: bytes, low: bytes, count: int) -> bool:
    """Whether the first `count` ids may equal those of which `low` has the lower halves. It rejects
    most differences without unpacking, and fewer ids than that."""
    return packed[1 : 1 + LOW_BYTES * count] == low[: LOW_BYTES * count]


def cut_evenly(data: bytes | bytearray, step: int) -> tuple[bytes, ...]:
    """The whole pieces of `step` bytes. One call: slicing each takes three times as long."""
    return struct.unpack_from(f"{step}s" * (len(data) // step), data)


def _packed(ids: NDArray[np.uint32], width: int) -> tuple[bytes, ...]:
    """Rows of ids, all of one width."""
    step = 1 + width * ids.shape[1]
    data = bytearray((width,)) * (step * len(ids))  # each row keeps its first byte
    low = np.ndarray(ids.shape, _TWO, data, 1, (step, LOW_BYTES))
    low[...] = ids
    if width > LOW_BYTES:
        kind, offset = _HIGH[width], 1 + LOW_BYTES * ids.shape[1]
        high = np.ndarray(ids.shape, kind, data, offset, (step, kind.itemsize))
        high[...] = ids >> 16
    return cut_evenly(data, step)
