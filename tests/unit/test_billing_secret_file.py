"""Secrets of the data directory: one for all who ask at once, whole or not there."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from billing.secret_file import read_or_make


def test_all_who_make_one_at_once_have_the_same(tmp_path):
    together = Barrier(4)

    def make(number: int) -> bytes:
        def fresh() -> bytes:
            together.wait()  # all have seen that there is none
            return bytes([number])

        return read_or_make(tmp_path / "secret", fresh)

    with ThreadPoolExecutor(4) as threads:
        assert 1 == len(set(threads.map(make, range(4))))
    assert [tmp_path / "secret"] == list(tmp_path.iterdir())
    assert 0o600 == stat.S_IMODE((tmp_path / "secret").stat().st_mode)


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        read_or_make(tmp_path / "secret", lambda: b"x")
    assert [] == list(tmp_path.iterdir())
