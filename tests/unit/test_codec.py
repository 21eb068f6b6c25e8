"""The codec gives back every byte, shrinks KV and refuses what it did not write, by numpy and by
compiled functions."""

import contextlib
import ctypes
import mmap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.operators.library import Operators
from tiers.disk.format import planes
from tiers.disk.format.codec import CHUNK_BYTES, Codec, CodecId, DecodeError, bound


def aligned(nbytes: int) -> memoryview:
    return memoryview(np.zeros(-(-nbytes // 8), np.uint64)).cast("B")[:nbytes]


def encode(item_bytes: int, block: bytes) -> tuple[CodecId, memoryview]:
    into = aligned(bound(len(block)))
    codec, nbytes = Codec(item_bytes).encode(memoryview(block), into)
    return codec, into[:nbytes]


def decode(item_bytes: int, codec: int, payload: memoryview, nbytes: int) -> bytes:
    into = bytearray(nbytes)
    Codec(item_bytes).decode(codec, payload, memoryview(into))
    return bytes(into)


def kv(num_items: int, dtype: str, seed: int = 0) -> bytes:
    """Floats of many scales, as KV has them; bfloat16 is the high half of a float32."""
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.normal(size=64)).astype(np.float32)
    values = rng.normal(size=(-(-num_items // 64), 64)).astype(np.float32) * scale
    flat = values.reshape(-1)[:num_items]
    if dtype == "bfloat16":
        return (flat.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return flat.astype(dtype).tobytes()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([1, 2, 4]), st.binary(max_size=4000))
def test_any_bytes_come_back(item_bytes, block):
    """Whatever the bytes and however many, decode(encode(x)) == x."""
    block = block[: len(block) // item_bytes * item_bytes]
    codec, payload = encode(item_bytes, block)
    assert block == decode(item_bytes, codec, payload, len(block))


@pytest.mark.parametrize(
    ("dtype", "item_bytes", "ratio"), [("bfloat16", 2, 1.40), ("float32", 4, 1.16)]
)
def test_floats_shrink_to_about_the_entropy_of_their_exponents(dtype, item_bytes, ratio):
    block = kv(200_000, dtype)
    _, payload = encode(item_bytes, block)
    assert len(block) / len(payload) > ratio


def test_noise_is_stored_raw():
    block = np.random.default_rng(1).bytes(1 << 16)
    codec, payload = encode(2, block)
    assert (CodecId.RAW, len(block)) == (codec, len(payload))


@pytest.mark.parametrize(("num_values", "codec"), [(100, CodecId.RAW), (64, CodecId.PLANES16)])
def test_what_saves_less_than_a_tenth_is_stored_raw(num_values, codec):
    """6.6 bits of a high byte's 8 are 8 % of the block, and 6 are 12 %."""
    items = np.random.default_rng(1).integers(0, 1 << 16, 1 << 16, "<u2") & 0xFF
    items |= (np.random.default_rng(2).integers(0, num_values, 1 << 16) << 8).astype("<u2")
    assert codec == encode(2, items.tobytes())[0]


@pytest.mark.parametrize("item_bytes", [2, 4])
def test_a_cut_payload_does_not_decode(item_bytes):
    """Cut anywhere, or with a length that points elsewhere, it is a DecodeError."""
    block = kv(4096, "bfloat16" if item_bytes == 2 else "float32")
    codec, payload = encode(item_bytes, block)
    for end in [0, 3, 8, len(payload) // 2, len(payload) - 9]:
        with pytest.raises(DecodeError):
            decode(item_bytes, codec, payload[:end], len(block))
    bad = aligned(len(payload))
    for at in range(1, 4):
        bad[:] = payload
        bad[at] ^= 0xFF
        with pytest.raises(DecodeError):
            decode(item_bytes, codec, bad, len(block))


def test_an_unknown_codec_is_refused():
    with pytest.raises(DecodeError, match="unknown codec 77"):
        decode(2, 77, memoryview(b"12345678"), 8)
    with pytest.raises(DecodeError, match="raw bytes"):
        decode(2, CodecId.RAW, memoryview(b"1234567"), 8)


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=600), st.integers(0, 3))
def test_garbage_raises_only_decode_errors(payload, codec):
    padded = aligned(len(payload))
    padded[:] = payload
    into = bytearray(b"kept" * 66)
    with contextlib.suppress(DecodeError):
        Codec(2).decode(codec, padded, memoryview(into)[:256])
    assert b"kept" * 2 == into[256:], "garbage was written beyond the block"


@pytest.fixture(autouse=True)
def by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins without compiled functions, and leaves none."""
    monkeypatch.setattr(planes, "_compiled", {})


def compiled(operators: Operators) -> Path:
    return operators.loaded


@pytest.mark.parametrize("item_bytes", [2, 4])
@pytest.mark.parametrize("nbytes", [8, 16, 1000, 12_360, CHUNK_BYTES + 1_048, 5_898_240])
@pytest.mark.parametrize("offset", [0, 8])  # from a line, and so from a page, on
def test_a_block_is_expanded_to_the_same_bytes(operators, item_bytes, nbytes, offset):
    values = np.random.default_rng(nbytes).standard_normal(nbytes // 4).astype(np.float32)
    block, record = values.data.cast("B"), memoryview(bytearray(bound(nbytes)))
    codec = Codec(item_bytes)
    nbytes_coded = codec._encode_planes(block, record)
    for is_compiled in (False, True):
        if is_compiled:
            assert planes.use_library(compiled(operators))
            assert {2, 4} == planes._compiled.keys()
        expanded = memoryview(mmap.mmap(-1, offset + nbytes))[offset:]
        codec._decode_planes(item_bytes, record[:nbytes_coded], expanded)
        assert block == expanded


@pytest.mark.parametrize("rest", [False, True])
def test_a_library_with_other_bytes_is_not_used(operators, monkeypatch, caplog, rest):
    """Neither where they differ in whole lines, nor where they do in a rest."""
    library = ctypes.CDLL(str(compiled(operators)))

    def other(low: int, high: int, items: int, count: int) -> None:
        library.cachesvc_join32(*map(ctypes.c_void_p, (low, high, items)), ctypes.c_size_t(count))
        if bool(count % 64) is rest:
            ctypes.memset(items + 4 * count - 1, 0x55, 1)

    made = SimpleNamespace(cachesvc_join16=library.cachesvc_join16, cachesvc_join32=other)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: made)
    assert not planes.use_library(Path("other.so"))
    assert "other.so has other bytes" in caplog.text
    assert not planes._compiled


@pytest.mark.parametrize("text", [b"", b"no library"])
def test_a_start_goes_on_without_a_library(tmp_path, text):
    (tmp_path / "a.so").write_bytes(text)
    assert not planes.use_library(tmp_path / "a.so")
    assert not planes.use_library(tmp_path / "absent.so")
    assert not planes._compiled
