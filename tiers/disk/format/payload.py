"""A record's payload: the coded block in one piece, or in two, the first readable alone.

Pure functions over bytes, for the threads of the disk tier and the tier below it.
"""

import xxhash

from tiers.blocks.keys import PrefixKey, child_key
from tiers.blocks.part import Part
from tiers.disk.format.codec import Codec, CodecId, bound
from tiers.disk.format.record import (
    Header,
    Lasting,
    check_payload,
    header_end,
    pack_header,
    record_key,
    unpack_header,
)
from tiers.errors import MissReason


def payload_bound(logical_nbytes: int, split: int | None) -> int:
    """The maximum of bytes that `encode` writes for a block of this size."""
    if split is None:
        return bound(logical_nbytes)
    return bound(split) + bound(logical_nbytes - split) + 8


def encode(
    codec: Codec, block: memoryview, into: memoryview, split: int | None
) -> tuple[CodecId, int, Lasting | None]:
    """Writes the coded block to the start of `into`.

    With `split`, writes two pieces, the first with that many bytes of the block. Returns the codec
    of the last piece and the payload's length.
    """
    if split is None:
        return *codec.encode(block, into), None
    used, nbytes = codec.encode(block[:split], into) if split else (CodecId.RAW, 0)
    checksum = xxhash.xxh3_64_intdigest(into[:nbytes])
    lasting = Lasting(split, nbytes, checksum, used)
    into[nbytes : lasting.end] = bytes(lasting.end - nbytes)
    used, nbytes = codec.encode(block[split:], into[lasting.end :])
    return used, lasting.end + nbytes, lasting


def joined(lasting: bytes, window: bytes) -> bytes:
    """The record of a whole block, made of those of its two parts, each verified."""
    first, second = unpack_header(lasting), unpack_header(window)
    assert isinstance(first, Header) and isinstance(second, Header), "a record was not verified"
    own = lasting[-first.payload_nbytes :] if first.payload_nbytes else b""
    size = first.logical_nbytes, first.payload_nbytes, first.payload_checksum, first.codec
    kept = Lasting(*size)
    payload = own.ljust(kept.end, b"\0") + window[-second.payload_nbytes :]
    header = pack_header(
        first.block_id,
        layout=first.layout,
        codec=second.codec,
        item_bytes=first.item_bytes,
        logical_nbytes=first.logical_nbytes + second.logical_nbytes,
        payload=memoryview(payload),
        written_s=first.written_s,
        lasting=kept,
        computed_s=first.computed_s,
    )
    return header + payload


def needed_nbytes(header: Header, part: Part) -> int:
    """The number of leading payload bytes needed for a part of the block."""
    if part is Part.LASTING and header.lasting is not None:
        return header.lasting.payload_nbytes
    return header.payload_nbytes


def check(header: Header, payload: memoryview, part: Part) -> MissReason | None:
    """Why the payload does not match `header`; None if it does. `payload` has the bytes needed for
    the part and is checked completely."""
    lasting = header.lasting
    if part is not Part.LASTING or lasting is None:
        return check_payload(header, payload)
    if len(payload) != lasting.payload_nbytes:
        return MissReason.TORN
    if xxhash.xxh3_64_intdigest(payload) != lasting.payload_checksum:
        return MissReason.CHECKSUM
    return None


def decode(
    codec: Codec, header: Header, payload: memoryview, into: memoryview, part: Part = Part.WHOLE
) -> None:
    """Fills the part of `into`, exactly one block, from a checked 8-aligned payload. Raises
    DecodeError. A payload of one piece fills all of it, or the part that its record has."""
    lasting = header.lasting
    if header.part is not Part.WHOLE:
        nbytes = header.logical_nbytes
        if nbytes:  # without full layers, the first part is empty
            first = 0 if header.part is Part.LASTING else len(into) - nbytes
            codec.decode(header.codec, payload, into[first : first + nbytes])
        return
    if lasting is None:
        codec.decode(header.codec, payload, into)
        return
    split = lasting.logical_nbytes
    if part is not Part.WINDOW:
        codec.decode(lasting.codec, payload[: lasting.payload_nbytes], into[:split])
    if part is not Part.LASTING:
        codec.decode(header.codec, payload[lasting.end :], into[split:])


def proven(record: memoryview, key: PrefixKey | None) -> Header | MissReason:
    """The record's header if header, payload and key are valid, else the reason."""
    header = unpack_header(record)
    if isinstance(header, MissReason):
        return header
    if key is not None and record_key(header) != key:
        return MissReason.ABSENT
    if child_key(header.parent, header.tokens, header.content) != header.key:
        return MissReason.COLLISION
    if header.codec not in tuple(CodecId):
        return MissReason.VERSION
    start = header_end(record)
    return check_payload(header, record[start : start + header.payload_nbytes]) or header
