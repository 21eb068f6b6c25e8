"""One branch or leaf page of LMDB: untrusted bytes, and where its nodes are.

Format: LMDB 0.9, data version 1, little-endian, pages of 4 KiB; `struct MDB_page` and `MDB_node` of
mdb.c. Pure functions.
"""

import struct

PAGE = 4096
HEADER = 16
NODE = 8
BRANCH, LEAF, OVERFLOW, META = 0x01, 0x02, 0x04, 0x08
BIG, SUB = 0x01, 0x02  # node flags: the value is a run of pages; the value is a tree
PAGE_HEAD = struct.Struct("<QHHHH")  # number, pad, flags, lower, upper
NODE_HEAD = struct.Struct("<HHHH")  # low and high half of the size, flags, length of the key
_RUN_HEAD = struct.Struct("<QHHI")  # number, pad, flags, pages


class Torn(Exception):
    """A page was not written by LMDB."""


def flags_of(page: bytes) -> int:
    flags = int.from_bytes(page[10:12], "little")
    if flags not in (BRANCH, LEAF):
        raise Torn(f"a page has flags {flags:#x} where a branch or a leaf belongs")
    return flags


def search(page: bytes, key: bytes) -> int:
    """The place of the last node at or before `key`; -1 if a leaf has none."""
    first = low = int(flags_of(page) == BRANCH)  # the first child's key is meaningless
    high = num_nodes(page)
    while low < high:
        middle = (low + high) // 2
        at = page[HEADER + 2 * middle] | page[HEADER + 2 * middle + 1] << 8
        start = at + NODE
        if page[start : start + (page[at + 6] | page[at + 7] << 8)] <= key:
            low = middle + 1
        else:
            high = middle
    return max(low, first) - 1


def room_of(page: bytes) -> tuple[int, int]:
    """Where the free space of a page begins and ends."""
    lower, upper = PAGE_HEAD.unpack_from(page)[3:]
    return int(lower), int(upper)


def num_nodes(page: bytes) -> int:
    return (room_of(page)[0] - HEADER) // 2


def child_at(page: bytes, place: int) -> int:
    low, middle, high, _ = NODE_HEAD.unpack_from(page, pointer(page, place))
    return int(low | middle << 16 | high << 32)


def pointer(page: bytes, place: int) -> int:
    return int.from_bytes(page[HEADER + 2 * place : HEADER + 2 * place + 2], "little")


def check_nodes(page: bytes, number: int) -> None:
    """Checks that the nodes of a page lie side by side inside it, as far as LMDB relies on it."""
    import numpy as np  # here, since a command that only counts blocks needs none

    is_branch, count = flags_of(page) == BRANCH, num_nodes(page)
    lower, upper = room_of(page)
    if not HEADER <= lower <= upper <= PAGE or lower % 2 or count < 1 + is_branch:
        raise Torn(f"page {number} has its room from {lower} to {upper}")
    words = np.frombuffer(page, "<u2").astype(np.int64)
    at = np.sort(words[HEADER // 2 : lower // 2])
    if at[0] != upper or at[-1] > PAGE - NODE or (at & 1).any():
        raise Torn(f"page {number} has a node outside of its part")
    first = at >> 1
    size = NODE + words[first + 3]
    if not is_branch:
        value = words[first] | words[first + 1] << 16
        size += np.where(words[first + 2] == BIG, 8, value)
    if not np.array_equal(at + size + (size & 1), np.append(at[1:], PAGE)):
        raise Torn(f"the nodes of page {number} do not lie side by side")


def run_pages(nbytes: int) -> int:
    """The number of pages for a value of this length."""
    return -(-(nbytes + HEADER) // PAGE)


def run_head(first: int, nbytes: int) -> bytes:
    """The HEADER bytes before a value in its run."""
    return _RUN_HEAD.pack(first, 0, OVERFLOW, run_pages(nbytes))


def is_run_head(head: bytes, first: int, nbytes: int) -> bool:
    """Whether these bytes before a value are what LMDB needs to free the run."""
    if len(head) < HEADER:
        return False
    number, _, flags, pages = _RUN_HEAD.unpack(head)
    return (number, flags, pages) == (first, OVERFLOW, run_pages(nbytes))
