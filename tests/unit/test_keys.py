"""Prefix keys are the same in every process, on every machine: golden values hold them."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from tiers.blocks.chain import Chain
from tiers.blocks.keys import CacheScope, block_ids, child_key, prefix_keys, token_bytes

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def test_the_root_of_the_empty_scope_is_golden():
    assert CacheScope().root().hex() == "2158bfbeaf39b191fbc689dfdd919b31"


def test_keys_are_golden():
    root = CacheScope(weights=b"w", tokenizer=b"t", layout=b"l", tenant=b"a").root()
    keys = prefix_keys(root, token_bytes(range(8)), 4)
    assert root.hex() == "38e9f0b87efeb3077af1ccdfb9ce62e6"
    assert [key.hex() for key in keys] == [
        "7929fe73140a95a31be01f023a20b54f",
        "bb289f9f3e5c61a09cb00e80458d1231",
    ]


def test_fields_of_a_scope_cannot_run_into_each_other():
    assert CacheScope(weights=b"ab").root() != CacheScope(weights=b"a", tokenizer=b"b").root()
    assert CacheScope(adapter=b"x").root() != CacheScope(tenant=b"x").root()


def test_token_bytes_are_little_endian_int32_whatever_they_came_in():
    assert token_bytes([1, 258]) == b"\1\0\0\0\2\1\0\0" == token_bytes(array("i", [1, 258]))


def test_content_changes_the_key_and_so_every_key_after_it():
    root = CacheScope().root()
    plain = Chain(root, range(12), 4)
    image = Chain(root, range(12), 4, contents=[b"", b"digest"])
    assert plain.keys[0] == image.keys[0]
    assert plain.keys[1] != image.keys[1] and plain.keys[2] != image.keys[2]


@given(tokens, st.integers(1, 7))
def test_a_chain_has_the_keys_of_its_tokens_however_it_grew(ids, size):
    root = CacheScope(tenant=b"x").root()
    whole = prefix_keys(root, token_bytes(ids), size)
    chain = Chain(root, (), size)
    for token in ids:
        chain.append(token)
    assert chain.keys == whole == Chain(root, ids, size).keys
    assert chain.num_tokens == len(ids) and len(chain.tail) == len(ids) % size * 4
    assert [i.key for i in block_ids(root, token_bytes(ids), size)] == whole


@given(tokens, tokens, st.integers(1, 5))
def test_keys_are_equal_exactly_where_the_prefixes_are(a, b, n):
    root = CacheScope().root()
    for number, (x, y) in enumerate(
        zip(Chain(root, a, n).keys, Chain(root, b, n).keys, strict=False), 1
    ):
        assert (x == y) == (a[: number * n] == b[: number * n])


def test_a_child_key_depends_on_parent_tokens_and_content():
    root = CacheScope().root()
    keys = {child_key(root, b"abcd"), child_key(root, b"abce"), child_key(root, b"abcd", b"!")}
    assert len(keys | {child_key(child_key(root, b"abcd"), b"abcd")}) == 4
