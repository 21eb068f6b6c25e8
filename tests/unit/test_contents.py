"""Content digests in block keys: equal bytes over equal tokens mean equal content in every row."""

import random
from array import array

import pytest

from tiers.blocks.chain import Chain
from tiers.blocks.contents import Content, block_contents, refusal
from tiers.blocks.keys import CacheScope

ROOT = CacheScope().root()
CAT, DOG = b"c" * 32, b"d" * 32


def keys(*contents: Content, size: int = 4, tokens: int = 16) -> list[bytes]:
    return list(Chain(ROOT, array("i", [7] * tokens), size, block_contents(contents, size)).keys)


def test_only_blocks_that_content_covers_carry_it():
    blocks = block_contents([Content(5, 2, CAT), Content(11, 2, DOG)], 4)
    assert [False, True, True, True] == [bool(one) for one in blocks]
    assert CAT in blocks[1] and DOG in blocks[2] and DOG in blocks[3]
    assert [] == block_contents([], 4)


@pytest.mark.parametrize(
    "other",
    [
        Content(5, 6, DOG),
        Content(4, 6, CAT),
        Content(5, 5, CAT),
        Content(5, 6, CAT, native=True),
        Content(5, 6, CAT[:16]),
    ],
)
def test_another_content_parts_where_it_begins(other):
    """By what it is, where it lies, how long it is, and how it is named."""
    plain, one, two = keys(), keys(Content(5, 6, CAT)), keys(other)
    assert plain[:1] == one[:1] == two[:1]
    assert not {*plain[1:]} & {*one[1:]} and not {*one[1:]} & {*two[1:]}
    assert one == keys(Content(5, 6, CAT))


def test_content_of_several_blocks_is_told_apart_by_its_part():
    assert 4 == len(set(block_contents([Content(0, 16, CAT)], 4)))


def test_equal_bytes_mean_equal_content_in_every_row():
    """Random contents over one block: its bytes are equal just where every row is."""
    chance = random.Random(3)
    seen: dict[bytes, list[object]] = {}
    for _ in range(3000):
        start = chance.randrange(-3, 4)
        row, contents = max(start, 0), []
        while row < 4 and chance.random() < 0.8:
            row += chance.randrange(2)
            contents.append(
                Content(4 + row, chance.randrange(1, 6), chance.choice((b"a", b"b", b"ab")))
            )
            row = contents[-1].end - 4
        rows: list[object] = [None] * 4
        for content in contents:
            for position in range(content.start, min(content.end, 8)):
                rows[position - 4] = (content.digest, position - content.start, content.length)
        blocks = block_contents(contents, 4)
        assert rows == seen.setdefault(blocks[1] if len(blocks) > 1 else b"", rows)
    assert len(seen) > 100


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        ([Content(8, 3, CAT)], "covers tokens 8 to 11, and the prompt has 10"),
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
