"""A record's header proves what the record is, or says why it does not. Of a payload in two pieces
either is read and proven alone, and damage in one does not hide."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiers.blocks.keys import BlockId, PrefixKey, token_bytes
from tiers.blocks.layout import BlockLayout, LayerLayout
from tiers.blocks.part import Part
from tiers.disk.format.codec import Codec
from tiers.disk.format.payload import check, decode, encode, needed_nbytes, payload_bound
from tiers.disk.format.record import (
    VERSION_PARTED,
    Header,
    check_payload,
    header_nbytes,
    is_block,
    pack_header,
    unpack_header,
)
from tiers.errors import MissReason

LAYOUT = b"L" * 16
PAYLOAD = memoryview(bytes(range(200)))


def block(tokens: bytes = token_bytes(range(16)), content: bytes = b"") -> BlockId:
    return BlockId(
        PrefixKey(b"s" * 16), PrefixKey(b"p" * 16), PrefixKey(b"k" * 16), tokens, content
    )


def packed(of: BlockId) -> bytes:
    sizes = {"item_bytes": 2, "logical_nbytes": 256, "written_s": 1_700_000_000}
    return pack_header(of, layout=LAYOUT, codec=1, payload=PAYLOAD, **sizes)  # type: ignore[arg-type]


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=300), st.binary(max_size=80))
def test_what_was_packed_is_unpacked(tokens, content):
    of = block(tokens, content)
    data = packed(of)
    header = unpack_header(data + PAYLOAD)
    assert of == header.block_id
    assert (1, 2, LAYOUT) == (header.codec, header.item_bytes, header.layout)
    assert (256, 200) == (header.logical_nbytes, header.payload_nbytes)
    assert 1_700_000_000 == header.written_s
    assert header_nbytes(of) == len(data)
    assert len(data) % 16 == 0
    assert is_block(data, of)
    assert check_payload(header, PAYLOAD) is None


def test_every_flipped_bit_of_a_header_is_seen():
    """No bit of the header can change without the record becoming a miss."""
    data = packed(block(content=b"image"))
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert isinstance(unpack_header(bytes(flipped)), MissReason), f"bit {bit} went unseen"


def test_every_flipped_bit_of_a_payload_is_seen():
    header = unpack_header(packed(block()))
    for bit in range(len(PAYLOAD) * 8):
        flipped = bytearray(PAYLOAD)
        flipped[bit // 8] ^= 1 << bit % 8
        assert check_payload(header, memoryview(flipped)) == MissReason.CHECKSUM
    assert check_payload(header, PAYLOAD[:-1]) == MissReason.TORN


@pytest.mark.parametrize("end", [0, 8, 16, 127, 135, 199])
def test_a_cut_header_is_torn(end):
    assert unpack_header(packed(block())[:end]) == MissReason.TORN


def test_another_format_version_is_named_as_such():
    data = bytearray(packed(block()))
    data[8] = 5
    assert unpack_header(bytes(data)) == MissReason.VERSION


@pytest.mark.parametrize("field", ["scope", "parent", "key", "tokens", "content"])
def test_identity_needs_every_field(field):
    of = block(content=b"image")
    value = getattr(of, field)
    other = value + b"!" if field in ("tokens", "content") else b"!" * 16
    for changed in (value[:-1] + b"!", other):
        assert not is_block(packed(of), of._replace(**{field: changed}))


def test_tokens_and_content_do_not_run_into_each_other():
    assert not is_block(packed(block(b"abcd", b"efgh")), block(b"abcdefgh", b""))


def test_golden_header():
    """The bytes of version 1, so that a change of the format cannot pass unnoticed."""
    data = packed(block(token_bytes([1, 2]), b"c"))
    assert b"cachesvc" + bytes.fromhex("01000102a0000000") == data[:16]
    assert len(data) == 160
    assert data[-8:].hex() == "e6aef9bf4a305514"


FULL, SLIDING = LayerLayout(2, 16, 16), LayerLayout(2, 16, 16, window=40)
LAYOUTS = {
    "one of six full": BlockLayout((SLIDING,) * 5 + (FULL,), 16, "bfloat16"),
    "all sliding": BlockLayout((SLIDING,) * 2, 16, "float32"),
}


def block_of(layout: BlockLayout, kind: str) -> bytes:
    """Like KV, which is compressed, or noise, which is not."""
    random = np.random.default_rng(0)
    if kind == "noise":
        return random.bytes(layout.nbytes)
    floats = random.normal(size=layout.nbytes // 4).astype("<f4")
    return floats.tobytes()


def record(layout: BlockLayout, data: bytes) -> tuple[Header, memoryview]:
    codec = Codec(layout.torch_dtype.itemsize)
    room = memoryview(np.zeros(payload_bound(layout.nbytes, layout.lasting_nbytes), np.uint8)).cast(
        "B"
    )
    used, nbytes, lasting = encode(codec, memoryview(data), room, layout.lasting_nbytes)
    key = BlockId(*(PrefixKey(each * 16) for each in (b"s", b"p", b"k")), token_bytes(range(16)))
    header = pack_header(
        key,
        layout=layout.digest(),
        codec=used,
        item_bytes=layout.torch_dtype.itemsize,
        logical_nbytes=layout.nbytes,
        payload=room[:nbytes],
        written_s=1,
        lasting=lasting,
    )
    assert header_nbytes(key, parted=True) == len(header)
    assert VERSION_PARTED == int.from_bytes(header[8:10], "little")
    unpacked = unpack_header(header)
    assert (key, lasting) == (unpacked.block_id, unpacked.lasting)
    return unpacked, room[:nbytes]


@pytest.mark.parametrize("kind", ["noise", "normal"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_each_part_comes_back_and_touches_nothing_else(layout, kind):
    data = block_of(layout, kind)
    header, payload = record(layout, data)
    split, codec = layout.lasting_nbytes, Codec(layout.torch_dtype.itemsize)
    for part, has in (
        (Part.WHOLE, slice(None)),
        (Part.LASTING, slice(split)),
        (Part.WINDOW, slice(split, None)),
    ):
        into = bytearray(b"\xaa" * layout.nbytes)
        expected = bytearray(into)
        expected[has] = data[has]
        nbytes = needed_nbytes(header, part)
        assert check(header, payload[:nbytes], part) is None
        decode(codec, header, payload[:nbytes], memoryview(into), part)
        assert expected == into
    assert needed_nbytes(header, Part.LASTING) <= max(64, split + split // 8)
    assert needed_nbytes(header, Part.WINDOW) == len(payload)


def test_damage_is_found_in_the_part_that_is_read():
    layout = LAYOUTS["one of six full"]
    header, payload = record(layout, block_of(layout, "noise"))
    lasting = needed_nbytes(header, Part.LASTING)
    for position in (0, lasting - 1):
        damaged = bytearray(payload)
        damaged[position] ^= 1
        for part in Part:
            found = check(header, memoryview(damaged)[: needed_nbytes(header, part)], part)
            assert MissReason.CHECKSUM == found
    damaged = bytearray(payload)
    damaged[-1] ^= 1
    assert MissReason.CHECKSUM == check(header, memoryview(damaged), Part.WHOLE)
    assert MissReason.CHECKSUM == check(header, memoryview(damaged), Part.WINDOW)
    assert check(header, memoryview(damaged)[:lasting], Part.LASTING) is None
    assert MissReason.TORN == check(header, payload[: lasting - 1], Part.LASTING)
