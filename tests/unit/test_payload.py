"""A payload in two pieces: either is read and proven alone, and damage in one does not hide."""

import numpy as np
import pytest

from tiers.blocks.keys import BlockId, PrefixKey, token_bytes
from tiers.blocks.layout import BlockLayout, LayerLayout
from tiers.blocks.part import Part
from tiers.disk.format.codec import Codec
from tiers.disk.format.payload import check, decode, encode, needed_nbytes, payload_bound
from tiers.disk.format.record import (
    VERSION_PARTED,
    Header,
    header_nbytes,
    pack_header,
    unpack_header,
)
from tiers.errors import MissReason

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
    assert isinstance(unpacked, Header)
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
