"""One block on disk: a header with its identity, and the coded payload.

All integers are little-endian. Scope, parent and key are adjacent, as are tokens and content, so a
reader compares two slices. The header's own checksum is its last field; the payload's is inside the
header.

    offset  bytes  field                        offset  bytes  field
    0       8      magic "cachesvc"             88      4      length of tokens, bytes
    8       2      format version               92      4      length of content, bytes
    10      1      codec id                     96      8      length of the block, bytes
    11      1      bytes per item               104     8      length of the payload, bytes
    12      4      length of the header         112     8      xxh3_64 of the payload
    16      16     digest of the layout         120     8      written at, unix seconds
    32      16     scope: root key of the chain 128     ...    tokens (int32), content, zeros to
    48      16     parent key                   ...            a multiple of 16, less 8
    64      16     key                          ...     8      xxh3_64 of all header bytes before
    80      8      when its KV was computed, 0 for "when written"

Version 2 has two consecutive payloads, coded separately, so that the first can be read alone. The
first is the KV of layers without windows; the second begins at a multiple of 8. Between content and
zeros the header has, for the first payload: bytes of KV (8), coded bytes (8), their xxh3_64 (8),
codec id (8).

Versions 3 and 4 have one part of a block each, with the header of version 1: 3 the KV of layers
without windows, 4 that of the others. Both name their block. The record of version 4 is stored
under `window_key`, so that it has a place of its own in the order of eviction.

Pure functions over bytes, for every thread of the disk tier and for the command line.
"""

import struct
from typing import NamedTuple

import xxhash

from tiers.blocks.keys import KEY_BYTES, BlockId, PrefixKey
from tiers.blocks.part import Part
from tiers.errors import MissReason

MAGIC = b"cachesvc"
VERSION, VERSION_PARTED, VERSION_LASTING, VERSION_WINDOW = 1, 2, 3, 4
_VERSIONS = {Part.WHOLE: VERSION, Part.LASTING: VERSION_LASTING, Part.WINDOW: VERSION_WINDOW}
_PARTS = {version: part for part, version in _VERSIONS.items()} | {VERSION_PARTED: Part.WHOLE}
_WINDOW = b"w"  # after a block's key
_FIXED = struct.Struct("<8sHBBI16s16s16s16sQIIQQQQ")
_PREFIX = struct.Struct("<8sHBBI")
_CHECKSUM = struct.Struct("<Q")
_LASTING = struct.Struct("<QQQQ")
_IDENTITY = slice(32, 80)
assert _FIXED.size == 128


class Lasting(NamedTuple):
    """The first of two payloads: the KV of layers without windows."""

    logical_nbytes: int
    payload_nbytes: int
    payload_checksum: int
    codec: int

    @property
    def end(self) -> int:
        """Where the second payload begins."""
        return -(-self.payload_nbytes // 8) * 8


class Header(NamedTuple):
    """A record's header whose checksum was verified."""

    codec: int
    item_bytes: int
    layout: bytes
    scope: PrefixKey
    parent: PrefixKey
    key: PrefixKey
    tokens: bytes
    content: bytes
    logical_nbytes: int
    payload_nbytes: int
    payload_checksum: int
    written_s: int
    computed_s: int  # may be earlier than written, if the block was in memory first
    lasting: Lasting | None = None
    part: Part = Part.WHOLE  # what of the block the record has

    @property
    def block_id(self) -> BlockId:
        return BlockId(self.scope, self.parent, self.key, self.tokens, self.content)


def header_nbytes(block: BlockId, *, parted: bool = False) -> int:
    """Length of this block's header by `pack_header`; a multiple of 16."""
    named = len(block.tokens) + len(block.content) + (_LASTING.size if parted else 0)
    return -(-(_FIXED.size + named + 8) // 16) * 16


def pack_header(
    block: BlockId,
    *,
    layout: bytes,
    codec: int,
    item_bytes: int,
    logical_nbytes: int,
    payload: memoryview,
    written_s: int,
    lasting: Lasting | None = None,
    computed_s: int = 0,
    part: Part = Part.WHOLE,
) -> bytes:
    """The header of `block`, or of a part of it, with `payload`, whose checksum it computes."""
    nbytes = header_nbytes(block, parted=lasting is not None)
    fixed = _FIXED.pack(
        MAGIC,
        _VERSIONS[part] if lasting is None else VERSION_PARTED,
        codec,
        item_bytes,
        nbytes,
        layout,
        block.scope,
        block.parent,
        block.key,
        computed_s,
        len(block.tokens),
        len(block.content),
        logical_nbytes,
        len(payload),
        xxhash.xxh3_64_intdigest(payload),
        written_s,
    )
    first = b"" if lasting is None else _LASTING.pack(*lasting)
    body = (fixed + block.tokens + block.content + first).ljust(nbytes - 8, b"\0")
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def unpack_header(data: bytes | memoryview) -> Header | MissReason:
    """The header at the start of `data`, or the reason why it is not valid."""
    if len(data) < _FIXED.size + 8:
        return MissReason.TORN
    magic, version, _codec, _item, nbytes = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        return MissReason.CHECKSUM
    part = _PARTS.get(version)
    if part is None:
        return MissReason.VERSION
    if not _FIXED.size + 8 <= nbytes <= len(data):
        return MissReason.TORN
    (checksum,) = _CHECKSUM.unpack_from(data, nbytes - 8)
    if xxhash.xxh3_64_intdigest(data[: nbytes - 8]) != checksum:
        return MissReason.CHECKSUM
    fields = _FIXED.unpack_from(data)
    codec, item_bytes = fields[2], fields[3]
    layout, scope, parent, key, computed_s, num_tokens, num_content = fields[5:12]
    logical, coded, payload_checksum, written_s = fields[12:]
    named = num_tokens + num_content + (_LASTING.size if version == VERSION_PARTED else 0)
    if _FIXED.size + named + 8 > nbytes:
        return MissReason.TORN
    end = _FIXED.size + num_tokens
    lasting = None
    if version == VERSION_PARTED:
        lasting = Lasting(*_LASTING.unpack_from(data, end + num_content))
        if lasting.logical_nbytes > logical or lasting.end > coded:
            return MissReason.TORN
    return Header(
        codec,
        item_bytes,
        layout,
        scope,
        parent,
        key,
        bytes(data[_FIXED.size : end]),
        bytes(data[end : end + num_content]),
        logical,
        coded,
        payload_checksum,
        written_s,
        computed_s or written_s,
        lasting,
        part,
    )


def window_key(key: PrefixKey) -> PrefixKey:
    """The key of the record of a block's window part."""
    return PrefixKey(key + _WINDOW)


def block_key(key: PrefixKey) -> PrefixKey:
    """The key of the block that this record is of."""
    return PrefixKey(key[:KEY_BYTES])


def is_window(key: bytes) -> bool:
    """Whether the record with this key is a window part, and no block by itself."""
    return len(key) > KEY_BYTES


def num_blocks_of(key: bytes) -> int:
    """How many blocks the record with this key counts for: a window part for none."""
    return int(not is_window(key))


def record_key(header: Header) -> PrefixKey:
    return window_key(header.key) if header.part is Part.WINDOW else header.key


def part_of(header: bytes) -> Part | None:
    """The part of a block that the record has, by these header bytes, checked or not."""
    return _PARTS.get(int.from_bytes(header[8:10], "little"))


def is_block(header: bytes, block: BlockId) -> bool:
    """Whether these header bytes, checked or not, have exactly the identity of `block`."""
    if header[_IDENTITY] != block.scope + block.parent + block.key:
        return False
    num_tokens, num_content = struct.unpack_from("<II", header, 88)
    if (num_tokens, num_content) != (len(block.tokens), len(block.content)):
        return False
    start = _FIXED.size
    return header[start : start + num_tokens + num_content] == block.tokens + block.content


def scope_of(header: bytes) -> PrefixKey:
    """The scope named in these header bytes, checked or not."""
    return PrefixKey(header[32:48])


def parent_of(header: bytes) -> PrefixKey:
    """The parent's key named in these header bytes, checked or not."""
    return PrefixKey(header[48:64])


def logical_nbytes_of(header: bytes) -> int:
    """The length of the block named in these header bytes, checked or not."""
    return int.from_bytes(header[96:104], "little")


def tokens_of(header: bytes) -> bytes:
    """The token ids named in these header bytes, checked or not."""
    return header[_FIXED.size : _FIXED.size + int.from_bytes(header[88:92], "little")]


def written_s_of(header: bytes) -> int:
    """When the record with these header bytes was written, unix seconds."""
    return int.from_bytes(header[120:128], "little")


def check_payload(header: Header, payload: memoryview) -> MissReason | None:
    """Why this payload does not match `header`; None if it does."""
    if len(payload) != header.payload_nbytes:
        return MissReason.TORN
    if xxhash.xxh3_64_intdigest(payload) != header.payload_checksum:
        return MissReason.CHECKSUM
    return None


def header_end(record: memoryview | bytes) -> int:
    """Where the payload begins, by the record itself."""
    return int.from_bytes(record[12:16], "little")


def whole_nbytes(record: memoryview, header: Header) -> int:
    """Length of a record without the zeros that fill its page."""
    return header_end(record) + header.payload_nbytes
