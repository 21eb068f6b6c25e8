"""Packed ids: the same ids come back, and equal ids are equal bytes."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers.blocks.chain import Chain
from tiers.blocks.keys import CacheScope, token_bytes
from tiers.blocks.packing import (
    low_halves,
    may_begin,
    may_share,
    num_packed,
    pack,
    pack_blocks,
    unpack,
)

NARROW, MIDDLE, WIDE = (1 << 16) - 1, (1 << 24) - 1, (1 << 31) - 1
ids = st.one_of(st.integers(0, NARROW), st.integers(0, MIDDLE), st.integers(-1, WIDE))


@given(st.lists(ids, max_size=40))
def test_what_is_packed_comes_back(tokens):
    data = token_bytes(tokens)
    assert data == unpack(pack(data))
    assert len(tokens) == num_packed(pack(data))


@given(st.lists(st.lists(ids, min_size=4, max_size=4), max_size=6))
def test_many_blocks_are_packed_as_each_alone(blocks):
    data = [token_bytes(block) for block in blocks]
    assert [pack(block) for block in data] == list(pack_blocks(b"".join(data), 4))


@pytest.mark.parametrize(
    ("largest", "width"),
    [(0, 2), (NARROW, 2), (NARROW + 1, 3), (MIDDLE, 3), (MIDDLE + 1, 4), (-1, 4)],
)
def test_an_id_has_the_bytes_that_the_largest_needs(largest, width):
    assert 1 + 64 * width == len(pack(token_bytes([*range(63), largest])))


@given(st.lists(ids, min_size=1, max_size=9), st.integers(1, 9))
def test_what_begins_alike_is_not_passed_over(tokens, count):
    assert may_begin(pack(token_bytes(tokens)), token_bytes(tokens[:count]))


@given(st.lists(ids, max_size=9), st.lists(ids, max_size=9), st.integers(1, 9))
def test_ids_that_are_shared_are_not_passed_over(shared, other, count):
    packed, low = pack(token_bytes(shared + other)), low_halves(token_bytes(shared))
    assert may_share(packed, low, count) or count > len(shared)
    if count <= len(shared):
        changed = [*shared[: count - 1], shared[count - 1] ^ 1, *other]
        assert not may_share(pack(token_bytes(changed)), low, count)


def test_a_chain_that_grows_packs_each_block_once():
    chain = Chain(CacheScope().root(), array("i", range(40)), 16)
    first = chain.packed()[0]
    twin = chain.copy()
    for token in range(NARROW, NARROW + 8):
        chain.append(token)
    assert [pack(chunk) for chunk in chain.chunks] == chain.packed()
    assert chain.packed()[0] is first
    assert 2 == len(twin.packed())
