"""A record's header proves what the record is, or says why it does not."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiers.blocks.keys import BlockId, PrefixKey, token_bytes
from tiers.disk.format.record import (
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
    return pack_header(
        of,
        layout=LAYOUT,
        codec=1,
        item_bytes=2,
        logical_nbytes=256,
        payload=PAYLOAD,
        written_s=1_700_000_000,
    )


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=300), st.binary(max_size=80))
def test_what_was_packed_is_unpacked(tokens, content):
    of = block(tokens, content)
    data = packed(of)
    header = unpack_header(data + PAYLOAD)
    assert isinstance(header, Header)
    assert of == header.block_id
    assert (
        header.codec,
        header.item_bytes,
        header.layout,
        header.logical_nbytes,
        header.payload_nbytes,
        header.written_s,
    ) == (1, 2, LAYOUT, 256, 200, 1_700_000_000)
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
    assert isinstance(header, Header)
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
    for changed in (
        value[:-1] + b"!",
        value + b"!" if field in ("tokens", "content") else b"!" * 16,
    ):
        assert not is_block(packed(of), of._replace(**{field: changed}))


def test_tokens_and_content_do_not_run_into_each_other():
    assert not is_block(packed(block(b"abcd", b"efgh")), block(b"abcdefgh", b""))


def test_golden_header():
    """The bytes of version 1, so that a change of the format cannot pass unnoticed."""
    data = packed(block(token_bytes([1, 2]), b"c"))
    assert b"cachesvc" + bytes.fromhex("01000102a0000000") == data[:16]
    assert len(data) == 160
    assert data[-8:].hex() == "e6aef9bf4a305514"
