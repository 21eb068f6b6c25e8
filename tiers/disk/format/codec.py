"""Lossless compression of KV: exponents are compressed, mantissas are stored unchanged.

KV is floating point. Only its high bytes (sign and exponent) have less than 8 bits of entropy,
without repeats, so they get only zstd's Huffman stage. The other bytes are noise. The cost is in
splitting and joining planes, so they are laid out for whole-word arithmetic: a chunk is cut into
`lanes` equal runs, and one word holds a byte of each run.

    2-byte items, lanes a and b           4-byte items, lanes a to d (highest byte first)
    low   = b.lo << 8 | a.lo              low   = d[0] a[2] a[1] a[0], the same of b with d[1],
    high  = b.hi << 8 | a.hi                      of c with d[2]
                                          high  = d[3] c[3] b[3] a[3]

Payload: `u32 length of the compressed high plane` per chunk, padded to 8; then per chunk the low
words, the compressed high words, padding to 8; then the items that fill no lane, as they are.

Measured beside the plain recipe (strided byte planes) on one core of an AMD EPYC, 2026-11, 1.5 MB
of bfloat16: out 4.3 GB/s against 2.4, in 2.4; float32: out 5.7 against 3.7, in 3.6 (docs/disk.md).

Used by the reader threads and the writer thread of the disk tier, each with its own `Codec`; the
heavy calls (numpy over whole chunks, zstd) release the GIL.
"""

from collections.abc import Iterator
from enum import IntEnum

import numpy as np
import zstandard

from tiers.disk.format.planes import Words, join, split

CHUNK_BYTES = 2 << 20  # logical; fixed by the format. Its scratch memory fits the L2/L3 caches.
WORTH = 10  # compress only if it saves a tenth: a raw record is read three times as fast
_ALIGN = 8


class CodecId(IntEnum):
    """A payload's coding, stored in every record; never renumbered."""

    RAW = 0
    PLANES16 = 1
    PLANES32 = 2


class DecodeError(ValueError):
    """The payload was not written by this codec."""


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def bound(logical_nbytes: int) -> int:
    """The maximum of bytes that `Codec.encode` writes for a block of this size."""
    num_chunks = -(-logical_nbytes // CHUNK_BYTES)
    high = -(-logical_nbytes // 2)
    return logical_nbytes + high // 128 + num_chunks * (1024 + _ALIGN) + _ALIGN


class Codec:
    """Encodes and decodes blocks of items of `item_bytes` (1: stored raw, 2 or 4: planes). Owns
    scratch memory, so one instance belongs to one thread at a time."""

    def __init__(self, item_bytes: int) -> None:
        assert item_bytes in (1, 2, 4), item_bytes
        self._item_bytes = item_bytes
        parameters = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, window_log=17
        )
        self._compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self._decompressor = zstandard.ZstdDecompressor()
        self._scratch: dict[tuple[str, int], tuple[Words, Words]] = {}

    def encode(self, block: memoryview, into: memoryview) -> tuple[CodecId, int]:
        """Writes the coded `block` to the start of `into` (8-aligned, at least `bound` bytes).
        Returns the codec used and the payload's length. RAW if planes do not pay."""
        if self._item_bytes > 1:
            nbytes = self._encode_planes(block, into)
            if nbytes <= len(block) - len(block) // WORTH:
                codec = CodecId.PLANES16 if self._item_bytes == 2 else CodecId.PLANES32
                return codec, nbytes
        into[: len(block)] = block
        return CodecId.RAW, len(block)

    def decode(self, codec: int, payload: memoryview, into: memoryview) -> None:
        """Fills `into`, exactly one block, from an 8-aligned `payload`. Raises DecodeError; then
        the content of `into` is invalid and must not be served."""
        if codec == CodecId.RAW:
            if len(payload) != len(into):
                raise DecodeError(f"{len(payload)} raw bytes for a block of {len(into)}")
            into[:] = payload
            return
        if codec not in (CodecId.PLANES16, CodecId.PLANES32):
            raise DecodeError(f"unknown codec {codec}")
        try:
            self._decode_planes(2 if codec == CodecId.PLANES16 else 4, payload, into)
        except (zstandard.ZstdError, ValueError) as error:
            raise DecodeError(str(error)) from error

    def _encode_planes(self, block: memoryview, into: memoryview) -> int:
        dtype, lanes = _word(self._item_bytes)
        items = np.frombuffer(block, dtype)
        spans = list(_chunks(len(block), self._item_bytes, lanes))
        lengths = np.frombuffer(into, "<u4", len(spans))
        at = _padded(4 * len(spans))
        done = 0
        for number, lane_items in enumerate(spans):
            low = np.frombuffer(into, dtype, (lanes - 1) * lane_items, at)
            high, temp = self._words(dtype, lane_items)
            split(items[done : done + lanes * lane_items], low, high, temp)
            coded = self._compressor.compress(high.data)
            at += low.nbytes
            into[at : at + len(coded)] = coded
            lengths[number] = len(coded)
            at = _padded(at + len(coded))
            done += lanes * lane_items
        rest = block[done * self._item_bytes :]
        into[at : at + len(rest)] = rest
        return at + len(rest)

    def _decode_planes(self, item_bytes: int, payload: memoryview, into: memoryview) -> None:
        dtype, lanes = _word(item_bytes)
        items = np.frombuffer(into, dtype, len(into) // item_bytes)
        spans = list(_chunks(len(into), item_bytes, lanes))
        lengths = np.frombuffer(payload, "<u4", len(spans)).tolist()
        at = _padded(4 * len(spans))
        done = 0
        for lane_items, length in zip(spans, lengths, strict=True):
            low = np.frombuffer(payload, dtype, (lanes - 1) * lane_items, at)
            at += low.nbytes
            if at + length > len(payload):
                raise DecodeError(f"a high plane of {length} bytes at {at} of {len(payload)}")
            high, temp = self._words(dtype, lane_items)
            self._inflate(payload[at : at + length], high)
            join(low, high, temp, items[done : done + lanes * lane_items])
            at = _padded(at + length)
            done += lanes * lane_items
        rest = payload[at:]
        if len(rest) != len(into) - done * item_bytes:
            raise DecodeError(f"{len(rest)} bytes are left where the tail of the block should be")
        into[done * item_bytes :] = rest

    def _inflate(self, coded: memoryview, into: Words) -> None:
        """Decompresses a whole frame directly into `into`, without zstd's own buffer."""
        target = into.data.cast("B")
        got = self._decompressor.stream_reader(coded).readinto(target)
        if got != len(target):
            raise DecodeError(f"the high plane has {got} bytes, not {len(target)}")

    def _words(self, dtype: str, count: int) -> tuple[Words, Words]:
        pair = self._scratch.get((dtype, count))
        if pair is None:
            pair = self._scratch[dtype, count] = (np.empty(count, dtype), np.empty(count, dtype))
        return pair


def _word(item_bytes: int) -> tuple[str, int]:
    """The numpy type of an item, and how many lanes a chunk of such items has."""
    return f"<u{item_bytes}", item_bytes


def _chunks(nbytes: int, item_bytes: int, lanes: int) -> Iterator[int]:
    """Items per lane in each chunk of a block. Items that fill no lane are left over."""
    lane_items = nbytes // (item_bytes * lanes)
    most = CHUNK_BYTES // (item_bytes * lanes)
    while lane_items > 0:
        yield min(lane_items, most)
        lane_items -= most
