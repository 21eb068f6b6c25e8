"""A record's payload: the coded block in one piece, or in two of which the first can be read alone.

Pure functions over bytes, for the threads of the disk tier and of the tier beneath it.
"""

import xxhash

from tiers.blocks.part import Part
from tiers.disk.format.codec import Codec, CodecId, bound
from tiers.disk.format.record import Header, Lasting, check_payload
from tiers.errors import MissReason


def payload_bound(logical_nbytes: int, split: int | None) -> int:
    """The most bytes that `encode` may write for a block of this size."""
    if split is None:
        return bound(logical_nbytes)
    return bound(split) + bound(logical_nbytes - split) + 8


def encode(
    codec: Codec, block: memoryview, into: memoryview, split: int | None
) -> tuple[CodecId, int, Lasting | None]:
    """Write the coded block to the start of `into`; in two pieces where `split` says how many bytes
    of the block the first has. Returns the codec of the last piece, and the payload's length."""
    if split is None:
        return *codec.encode(block, into), None
    used, nbytes = codec.encode(block[:split], into) if split else (CodecId.RAW, 0)
    checksum = xxhash.xxh3_64_intdigest(into[:nbytes])
    lasting = Lasting(split, nbytes, checksum, used)
    into[nbytes : lasting.end] = bytes(lasting.end - nbytes)
    used, nbytes = codec.encode(block[split:], into[lasting.end :])
    return used, lasting.end + nbytes, lasting


def needed_nbytes(header: Header, part: Part) -> int:
    """How much of the payload, from its start, is needed for a part of the block."""
    if part is Part.LASTING and header.lasting is not None:
        return header.lasting.payload_nbytes
    return header.payload_nbytes


def check(header: Header, payload: memoryview, part: Part) -> MissReason | None:
    """Why this is not what was written under `header`; None where it is. `payload` has as much as
    is needed for the part, and is looked at whole."""
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
    """Fill the part of `into`, exactly one block, from an 8-aligned payload that was checked.

    Raises DecodeError. A payload of one piece fills all of it.
    """
    lasting = header.lasting
    if lasting is None:
        codec.decode(header.codec, payload, into)
        return
    split = lasting.logical_nbytes
    if part is not Part.WINDOW:
        codec.decode(lasting.codec, payload[: lasting.payload_nbytes], into[:split])
    if part is not Part.LASTING:
        codec.decode(header.codec, payload[lasting.end :], into[split:])
