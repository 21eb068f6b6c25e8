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
        split(items, low, high, temp)
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


def _lanes_of(items: Words) -> tuple[Any, int, list[Words], Words]:
    """The type of a word, how far its highest byte is shifted, and the lanes: the others and the
    last."""
    *others, last = items.reshape(items.itemsize, -1)
    return items.dtype.type, 8 * (items.itemsize - 1), others, last


def split(items: Words, low: Words, high: Words, temp: Words) -> None:
    """Fill words `low` [(lanes - 1) * n] and `high` [n] from `items` [lanes * n]; `temp` is [n]."""
    word, top, others, last = _lanes_of(items)
    np.bitwise_and(last, word(0xFF << top), out=high)
    for number, (lane, words) in enumerate(zip(others, low.reshape(len(others), -1), strict=True)):
        np.right_shift(lane, word(top), out=temp)
        if number:
            np.left_shift(temp, word(8 * number), out=temp)
        np.bitwise_or(high, temp, out=high)
        np.left_shift(last, word(top - 8 * number), out=temp)
        if number:
            np.bitwise_and(temp, word(0xFF << top), out=temp)
        np.bitwise_and(lane, word((1 << top) - 1), out=words)
        np.bitwise_or(words, temp, out=words)


def join(low: Words, high: Words, temp: Words, items: Words) -> None:
    """Inverse of `split`."""
    compiled = _compiled.get(items.itemsize)
    if compiled is not None:
        compiled(_address(low), _address(high), _address(items), len(high))
        return
    word, top, others, last = _lanes_of(items)
    np.bitwise_and(high, word(0xFF << top), out=last)
    for number, (lane, words) in enumerate(zip(others, low.reshape(len(others), -1), strict=True)):
        np.right_shift(words, word(top), out=temp)
        if number:
            np.left_shift(temp, word(8 * number), out=temp)
        np.bitwise_or(last, temp, out=last)
        np.left_shift(high, word(top - 8 * number), out=temp)
        if number:
            np.bitwise_and(temp, word(0xFF << top), out=temp)
        np.bitwise_and(words, word((1 << top) - 1), out=lane)
        np.bitwise_or(lane, temp, out=lane)
