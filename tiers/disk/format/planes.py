"""Words of byte planes, as `tiers.disk.format.codec` lays them out: split from items and joined.

numpy joins a chunk in up to twenty calls, and each lets go of Python's lock and takes it again. So
two readers expand 1.3 times as much as one (AMD EPYC, 2026-11). A function of a compiled library,
where there is one, is one call for the same bytes. The codec's threads.
"""

import ctypes
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

Words = NDArray[Any]

# Of a lane, of which joins are compared with numpy's: whole lines of memory, and also a rest.
CHECKED_ITEMS = (1024, 1000)
LINE_BYTES = 64

# By bytes of an item: (low, high, items, items of a lane), the first three by address. Of the whole
# process, as the library is.
_compiled: dict[int, Callable[[int, int, int, int], None]] = {}


def use_library(path: Path) -> bool:
    """Join by the library's functions from now on. False, with the reason in the log, if it has
    none, or they give other bytes than numpy. Any thread."""
    try:
        library = ctypes.CDLL(str(path))
        found = {2: library.cachesvc_join16, 4: library.cachesvc_join32}
    except (OSError, AttributeError) as error:
        logger.info("records are expanded without compiled functions: %s", error)
        return False
    for item_bytes, function in found.items():
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        function.restype = None
        if not _agrees(item_bytes, function):
            logger.warning("records are expanded by numpy: %s has other bytes", path)
            return False
    _compiled.update(found)
    return True


def split(item_bytes: int, items: Words, low: Words, high: Words, temp: Words) -> None:
    """Fill words `low` [(lanes - 1) * n] and `high` [n] from `items` [lanes * n]; `temp` is [n]."""
    (_split16 if item_bytes == 2 else _split32)(items, low, high, temp)


def join(item_bytes: int, low: Words, high: Words, temp: Words, items: Words) -> None:
    """Inverse of `split`; may overwrite `high`."""
    compiled = _compiled.get(item_bytes)
    if compiled is not None:
        compiled(_address(low), _address(high), _address(items), len(high))
        return
    (_join16 if item_bytes == 2 else _join32)(low, high, temp, items)


def _address(words: Words) -> int:
    address: int = words.__array_interface__["data"][0]
    return address


def _agrees(item_bytes: int, function: Callable[[int, int, int, int], None]) -> bool:
    dtype, lanes = np.dtype(f"<u{item_bytes}"), item_bytes
    random = np.random.default_rng(0)
    most = np.iinfo(dtype).max
    for count in CHECKED_ITEMS:
        items = random.integers(0, most, lanes * count, dtype, endpoint=True)
        low = np.empty((lanes - 1) * count, dtype)
        high, temp = np.empty(count, dtype), np.empty(count, dtype)
        split(item_bytes, items, low, high, temp)
        joined = _on_a_line(lanes * count, dtype)
        function(_address(low), _address(high), _address(joined), count)
        if not np.array_equal(items, joined):
            return False
    return True


def _on_a_line(count: int, dtype: np.dtype[Any]) -> Words:
    """Zeros that begin with a line of memory: the function writes only those line by line."""
    memory = np.zeros(count * dtype.itemsize + LINE_BYTES, np.uint8)
    start = -_address(memory) % LINE_BYTES
    return memory[start : start + count * dtype.itemsize].view(dtype)


def _split16(items: Words, low: Words, high: Words, temp: Words) -> None:
    a, b = items.reshape(2, -1)
    np.bitwise_and(b, np.uint16(0xFF00), out=high)
    np.right_shift(a, np.uint16(8), out=temp)
    np.bitwise_or(high, temp, out=high)
    np.left_shift(b, np.uint16(8), out=low)
    np.bitwise_and(a, np.uint16(0x00FF), out=temp)
    np.bitwise_or(low, temp, out=low)


def _join16(low: Words, high: Words, temp: Words, items: Words) -> None:
    """Inverse of `_split16`; overwrites `high`."""
    a, b = items.reshape(2, -1)
    np.bitwise_and(low, np.uint16(0x00FF), out=a)
    np.left_shift(high, np.uint16(8), out=temp)
    np.bitwise_or(a, temp, out=a)
    np.right_shift(low, np.uint16(8), out=b)
    np.bitwise_and(high, np.uint16(0xFF00), out=high)
    np.bitwise_or(b, high, out=b)


_TOP = np.uint32(0xFF000000)
_REST = np.uint32(0x00FFFFFF)


def _split32(items: Words, low: Words, high: Words, temp: Words) -> None:
    lanes = items.reshape(4, -1)
    d = lanes[3]
    np.bitwise_and(d, _TOP, out=high)
    for number, words in enumerate(low.reshape(3, -1)):
        lane = lanes[number]
        np.right_shift(lane, np.uint32(24), out=temp)
        if number:
            np.left_shift(temp, np.uint32(8 * number), out=temp)
        np.bitwise_or(high, temp, out=high)
        np.right_shift(d, np.uint32(8 * number), out=temp)
        np.left_shift(temp, np.uint32(24), out=temp)
        np.bitwise_and(lane, _REST, out=words)
        np.bitwise_or(words, temp, out=words)


def _join32(low: Words, high: Words, temp: Words, items: Words) -> None:
    lanes = items.reshape(4, -1)
    d = lanes[3]
    np.bitwise_and(high, _TOP, out=d)
    for number, words in enumerate(low.reshape(3, -1)):
        lane = lanes[number]
        np.right_shift(words, np.uint32(24), out=temp)
        if number:
            np.left_shift(temp, np.uint32(8 * number), out=temp)
        np.bitwise_or(d, temp, out=d)
        np.left_shift(high, np.uint32(24 - 8 * number), out=temp)
        if number:
            np.bitwise_and(temp, _TOP, out=temp)
        np.bitwise_and(words, _REST, out=lane)
        np.bitwise_or(lane, temp, out=lane)
