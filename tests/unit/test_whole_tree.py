"""All tiers as one forest: each block told once, at its hottest tier, whatever holds it."""

import time

from tests.unit.test_tree import BLOCK, OTHER, ROOT, index_of, shape
from tiers.blocks.chain import Chain
from tiers.blocks.keys import PrefixKey
from tiers.blocks.tree import TreeQuery
from tiers.disk.inspection.view import BlockInfo
from tiers.explore import DiskBlocks, TierForest, same_start
from tiers.memory.index import BlockIndex
from tiers.telemetry.misses import Absence, marks_of
from tiers.tier import TierName

SEED = 7


def on_disk(*prompts: list[int], root: PrefixKey = ROOT) -> DiskBlocks:
    """A picture of a disk that holds the full blocks of these prompts."""
    by_key, now_s = {}, int(time.time())
    for prompt in prompts:
        chain = Chain(root, prompt, BLOCK)
        for number, key in enumerate(chain.keys):
            by_key[key] = BlockInfo(
                key=key,
                stored_bytes=100,
                used_s=now_s - 60,
                scope=root,
                parent=chain.parent(number),
                tokens=chain.chunks[number],
                computed_s=now_s - 120,
            )
    by_parent: dict[PrefixKey, list[BlockInfo]] = {}
    for block in by_key.values():
        by_parent.setdefault(block.parent, []).append(block)
    return DiskBlocks(by_key, by_parent)


def test_a_block_in_two_tiers_is_told_once_at_the_hotter():
    forest = TierForest(index_of([1, 2, 3, 4]), on_disk([1, 2, 3, 4, 5, 6]))
    tree = forest.tree(TreeQuery())
    (root,) = tree.roots
    assert (0, [(6, [])]) == shape(root)
    assert [(TierName.DEVICE, 2), (TierName.DISK, 1)] == root.children[0].runs
    assert (3, 3) == (tree.num_blocks, tree.num_seen)


def test_scopes_of_the_disk_alone_are_shown_too():
    forest = TierForest(index_of([1, 2]), on_disk([1, 2], root=OTHER))
    assert [ROOT, OTHER] == [root.last for root in forest.tree(TreeQuery()).roots]


def test_a_branch_between_the_tiers_splits_the_run():
    forest = TierForest(index_of([1, 2, 3, 4]), on_disk([1, 2, 9, 9]))
    assert (0, [(2, [(2, []), (2, [])])]) == shape(forest.tree(TreeQuery()).roots[0])


def test_a_block_is_found_by_how_its_key_begins_and_told_whole():
    forest = TierForest(index_of([1, 2]), on_disk([1, 2, 3, 4]))
    first, second = Chain(ROOT, [1, 2, 3, 4], BLOCK).keys
    assert [second] == forest.starting(second.hex()[:10])
    detail = forest.detail(second)
    assert ((first, second), True) == (detail.trail, detail.complete)
    assert ((TierName.DISK,), 100) == (detail.block.tiers, detail.stored_bytes)
    assert 2 == detail.run
    assert [first, second] == forest.below(first, 10) and [first] == forest.below(first, 1)
    assert forest.detail(PrefixKey(b"\0" * 16)) is None


def test_a_run_ends_where_a_prefix_parts():
    forest = TierForest(index_of([1, 2, 3, 4, 5, 6]), on_disk([1, 2, 9, 9]))
    last = forest.detail(Chain(ROOT, [1, 2, 3, 4, 5, 6], BLOCK).keys[-1])
    assert last is not None and (3, 2) == (len(last.trail), last.run)


def test_a_prefix_whose_beginning_is_gone_is_not_complete():
    disk = on_disk([1, 2, 3, 4])
    first, second = Chain(ROOT, [1, 2, 3, 4], BLOCK).keys
    gone = DiskBlocks({second: disk.by_key[second]}, {first: disk.by_parent[first]})
    detail = TierForest(BlockIndex(), gone).detail(second)
    assert detail is not None and not detail.complete


def missed(prompt: list[int], number: int = 0, root: PrefixKey = ROOT) -> Absence:
    chain = Chain(root, prompt, BLOCK)
    marks = marks_of(chain.chunks[number], SEED)
    return Absence(parent=chain.parent(number), key=chain.keys[number], marks=marks)


def test_the_nearest_record_on_disk_says_where_a_prompt_parts():
    disk = on_disk([1, 2, 3, 4], [1, 2, 8, 8])
    rows, sibling = same_start(disk, missed([1, 2, 3, 9], 1), SEED)
    assert (1, Chain(ROOT, [1, 2, 3, 4], BLOCK).keys[1]) == (rows, sibling)
    assert (0, None) == same_start(disk, missed([1, 2, 3, 4], 1), SEED + 1)
    assert 0 == same_start(on_disk([1, 2]), missed([1, 2]), SEED)[0], "it is no sibling of itself"


def test_another_scope_that_holds_the_first_block_is_named():
    forest = TierForest(index_of([1, 2]), on_disk([1, 2], root=OTHER))
    assert [OTHER] == forest.scopes_with(missed([1, 2]), ROOT, SEED)
    assert [] == forest.scopes_with(missed([1, 3]), ROOT, SEED)
    assert [] == forest.scopes_with(missed([1, 2, 3, 4], 1), ROOT, SEED)
