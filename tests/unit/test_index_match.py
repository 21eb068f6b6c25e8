"""What the index serves is what was asked for, field by field, whatever the hash does."""

from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from tiers.blocks.chain import Chain
from tiers.blocks.keys import CacheScope
from tiers.memory.block import Block
from tiers.memory.index import BlockIndex

SIZE = 2
WIDE = (1, (1 << 16) + 1, (1 << 24) + 2)  # two alike in their lower halves
ROOTS = [CacheScope(tenant=tenant).root() for tenant in (b"a", b"b")]
prompts = st.tuples(
    st.sampled_from(ROOTS),
    st.lists(st.sampled_from(WIDE), min_size=SIZE, max_size=4 * SIZE),
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
