"""Prefix keys are the same in every process, on every machine, and tell contents apart row by row.
Packed ids come back, and equal ids are equal bytes. What the index serves is what was asked for,
field by field, whatever the hash does."""

import random
from array import array
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiers.blocks import packing
from tiers.blocks.chain import Chain
from tiers.blocks.contents import Content, block_contents, refusal
from tiers.blocks.keys import CacheScope, block_ids, prefix_keys, token_bytes
from tiers.memory.block import Block
from tiers.memory.index import BlockIndex

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def test_keys_are_golden():
    assert CacheScope().root().hex() == "2158bfbeaf39b191fbc689dfdd919b31"
    root = CacheScope(weights=b"w", tokenizer=b"t", layout=b"l", tenant=b"a").root()
    keys = prefix_keys(root, token_bytes(range(8)), 4)
    assert root.hex() == "38e9f0b87efeb3077af1ccdfb9ce62e6"
    assert [key.hex() for key in keys] == [
        "7929fe73140a95a31be01f023a20b54f",
        "bb289f9f3e5c61a09cb00e80458d1231",
    ]


def test_fields_of_a_scope_cannot_run_into_each_other():
    assert CacheScope(weights=b"ab").root() != CacheScope(weights=b"a", tokenizer=b"b").root()
    alone = [CacheScope(**{name: b"x"}).root() for name in ("adapter", "tenant", "arithmetic")]
    assert 3 == len(set(alone))


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


CAT, DOG = b"c" * 32, b"d" * 32


def test_only_blocks_that_content_covers_carry_it():
    blocks = block_contents([Content(5, 2, CAT), Content(11, 2, DOG)], 4)
    assert [False, True, True, True] == [bool(one) for one in blocks]
    assert CAT in blocks[1] and DOG in blocks[2] and DOG in blocks[3]
    assert [] == block_contents([], 4)


def test_equal_bytes_mean_equal_content_in_every_row():
    """Random contents over one block, some from the one before: its bytes are equal just where
    every row is."""
    chance = random.Random(3)
    seen: dict[bytes, list[object]] = {}
    for _ in range(3000):
        row, contents = chance.randrange(-3, 4), []
        while row < 4 and chance.random() < 0.8:
            row += chance.randrange(2)
            contents.append(
                Content(4 + row, chance.randrange(1, 10), chance.choice((b"a", b"b", b"ab")))
            )
            row = contents[-1].end - 4
        rows: list[object] = [None] * 4
        for content in contents:
            for position in range(max(4, content.start), min(content.end, 8)):
                rows[position - 4] = (content.digest, position - content.start, content.length)
        blocks = block_contents(contents, 4)
        assert rows == seen.setdefault(blocks[1] if len(blocks) > 1 else b"", rows)
    assert len(seen) > 100


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        ([Content(8, 3, CAT)], "covers tokens 8 to 11 of a prompt of 10"),
        ([Content(0, 0, CAT)], "covers tokens 0 to 0"),
        ([Content(0, 4, CAT), Content(3, 2, DOG)], "starts at token 3, before the one ahead ends"),
        ([Content(-1, 2, CAT)], "starts at token -1"),
        ([Content(0, 1, b"")], "digest of 0 bytes"),
        ([Content(0, 1, b"x" * 65)], "digest of 65 bytes; 1 to 64"),
        ([Content(n, 1, CAT) for n in range(1025)], "one too many: a prompt may have 1024"),
    ],
)
def test_what_does_not_fit_the_prompt_is_refused(contents, said):
    wrong = refusal(contents, 10 if len(contents) < 9 else 2000)
    assert wrong is not None and said in wrong[1]
    assert wrong[0] == len(contents) - 1


def test_what_fits_is_not_refused():
    assert refusal([Content(0, 4, CAT), Content(4, 6, DOG)], 10) is None


NARROW, MIDDLE, WIDE = (1 << 16) - 1, (1 << 24) - 1, (1 << 31) - 1
ids = st.one_of(st.integers(0, NARROW), st.integers(0, MIDDLE), st.integers(-1, WIDE))


@given(st.lists(ids, max_size=40))
def test_what_is_packed_comes_back(tokens):
    data = token_bytes(tokens)
    assert data == packing.unpack(packing.pack(data))
    assert len(tokens) == packing.num_packed(packing.pack(data))


@given(st.lists(st.lists(ids, min_size=4, max_size=4), max_size=6))
def test_many_blocks_are_packed_as_each_alone(blocks):
    data = [token_bytes(block) for block in blocks]
    assert [packing.pack(block) for block in data] == list(packing.pack_blocks(b"".join(data), 4))


@pytest.mark.parametrize(
    ("largest", "width"),
    [(0, 2), (NARROW, 2), (NARROW + 1, 3), (MIDDLE, 3), (MIDDLE + 1, 4), (-1, 4)],
)
def test_an_id_has_the_bytes_that_the_largest_needs(largest, width):
    assert 1 + 64 * width == len(packing.pack(token_bytes([*range(63), largest])))


@given(st.lists(ids, min_size=1, max_size=9), st.integers(1, 9))
def test_what_begins_alike_is_not_passed_over(tokens, count):
    assert packing.may_begin(packing.pack(token_bytes(tokens)), token_bytes(tokens[:count]))


@given(st.lists(ids, max_size=9), st.lists(ids, max_size=9), st.integers(1, 9))
def test_ids_that_are_shared_are_not_passed_over(shared, other, count):
    packed, low = packing.pack(token_bytes(shared + other)), packing.low_halves(token_bytes(shared))
    assert packing.may_share(packed, low, count) or count > len(shared)
    if count <= len(shared):
        changed = [*shared[: count - 1], shared[count - 1] ^ 1, *other]
        assert not packing.may_share(packing.pack(token_bytes(changed)), low, count)


def test_a_chain_that_grows_packs_each_block_once():
    chain = Chain(CacheScope().root(), array("i", range(40)), 16)
    first = chain.packed()[0]
    twin = chain.copy()
    for token in range(NARROW, NARROW + 8):
        chain.append(token)
    assert [packing.pack(chunk) for chunk in chain.chunks] == chain.packed()
    assert chain.packed()[0] is first
    assert 2 == len(twin.packed())


SIZE = 2
ALIKE = (1, (1 << 16) + 1, (1 << 24) + 2)  # two alike in their lower halves
ROOTS = [CacheScope(tenant=tenant).root() for tenant in (b"a", b"b")]
prompts = st.tuples(
    st.sampled_from(ROOTS),
    st.lists(st.sampled_from(ALIKE), min_size=SIZE, max_size=4 * SIZE),
    st.lists(st.sampled_from([b"", b"picture"]), max_size=3),
)


def weak(data: bytes) -> bytes:
    return bytes([sum(data) % 2]) * 16


def chain_of(prompt: tuple[bytes, list[int], list[bytes]]) -> Chain:
    root, tokens, contents = prompt
    return Chain(root, tokens, SIZE, contents)


@settings(max_examples=200)
@given(st.lists(prompts, min_size=1, max_size=4), prompts, st.integers(0, 1), st.integers(1, 4))
def test_a_run_is_of_blocks_with_the_same_identity(known, asked, start, end):
    """Two keys for all blocks: what is found ends where a plain comparison of all fields does."""
    with mock.patch("tiers.blocks.chain.xxhash.xxh3_128_digest", weak):
        index = BlockIndex()
        for chain in map(chain_of, known):
            for number, key in enumerate(chain.keys):
                if index.get(key) is None:
                    index.add(Block(0.0), chain, number)
        chain = chain_of(asked)
        start = min(start, len(chain.keys))
        wanted = []
        for identity in chain.block_ids(start, max(start, min(end, len(chain.keys)))):
            block = index.get(identity.key)
            if block is None or block.identity()[1:] != identity[1:]:
                break
            wanted.append(block)
        assert wanted == index.match(chain, start, end)
