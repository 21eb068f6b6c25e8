"""Words of planes are joined to the same bytes by numpy and by compiled functions."""

import ctypes
import mmap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from engine.operators.library import Operators
from tiers.disk.format import planes
from tiers.disk.format.codec import CHUNK_BYTES, Codec, bound


@pytest.fixture(autouse=True)
def by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins without compiled functions, and leaves none."""
    monkeypatch.setattr(planes, "_compiled", {})


def compiled(operators: Operators) -> Path:
    assert operators.loaded is not None
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
