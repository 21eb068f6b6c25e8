"""The tree of prefixes that the live index and the disk's records are shown as: each block is told
once, at its hottest tier, whatever holds it."""

import re
import time

import pytest

from cachesvc.cli.cache.tree import tree_lines
from tiers.blocks.chain import Chain
from tiers.blocks.keys import CacheScope, PrefixKey
from tiers.blocks.tree import Tree, TreeNode, TreeQuery, tree_json
from tiers.disk.inspection.view import BlockInfo
from tiers.errors import ConfigurationError
from tiers.explore import DiskBlocks, TierForest, same_start
from tiers.memory.block import Below, Block, BlockState
from tiers.memory.index import BlockIndex
from tiers.telemetry.misses import Absence, marks_of
from tiers.tier import TierName

ROOT = CacheScope(tenant=b"a").root()
OTHER = CacheScope(tenant=b"b").root()
BLOCK = 2


def tree_of(index: BlockIndex, query: TreeQuery) -> Tree:
    """The tree of blocks in memory alone."""
    return TierForest(index, DiskBlocks()).tree(query)


def index_of(*prompts: list[int], root: PrefixKey = ROOT) -> BlockIndex:
    index = BlockIndex()
    for prompt in prompts:
        add(index, prompt, root)
    return index


def add(index: BlockIndex, prompt: list[int], root: PrefixKey = ROOT) -> list[Block]:
    """The prompt's blocks stand on the device; what is left over is a partly filled one."""
    chain = Chain(root, prompt, BLOCK)
    blocks = index.match(chain)
    for number in range(len(blocks), len(chain.keys)):
        blocks.append(_ready(len(index)))
        index.add(blocks[-1], chain, number)
    if chain.tail:
        blocks.append(_ready(99))
        index.add_partial(blocks[-1], root, chain.parent(len(chain.keys)), chain.tail)
    return blocks


def _ready(slot: int) -> Block:
    block = Block(time.monotonic())
    block.slot = slot
    block.state = BlockState.READY
    return block


def shape(node: TreeNode) -> tuple[int, list[object]]:
    return node.num_tokens, [shape(child) for child in node.children]


def test_a_chain_without_a_branch_is_one_node_and_a_branch_splits_it():
    index = index_of([1, 2, 3, 4, 5])
    (root,) = tree_of(index, TreeQuery()).roots
    assert (0, [(5, [])]) == shape(root)
    add(index, [1, 2, 3, 4, 6, 7, 8, 9])
    (root,) = tree_of(index, TreeQuery()).roots
    assert (0, [(4, [(4, []), (1, [])])]) == shape(root)
    assert [1, 4] == sorted(node.num_tokens for node in root.children[0].children)
    assert 1 == sum(node.key is None for node in root.children[0].children)


def test_every_scope_is_a_root_until_its_last_block_leaves():
    index = index_of([1, 2, 3])
    blocks = add(index, [1, 2, 3], OTHER)
    assert {ROOT, OTHER} == {root.last for root in tree_of(index, TreeQuery()).roots}
    index.remove(blocks[0])
    assert [ROOT] == [root.last for root in tree_of(index, TreeQuery()).roots]
    short = add(index, [7], OTHER)
    assert [ROOT, OTHER] == [root.last for root in tree_of(index, TreeQuery()).roots]
    index.remove_partial(short[0])
    assert [ROOT] == [root.last for root in tree_of(index, TreeQuery()).roots]


def test_a_node_tells_tiers_pins_hits_and_what_costs_nothing_to_evict():
    index = BlockIndex()
    blocks = add(index, list(range(8)))
    blocks[0].ref_count, blocks[0].hits, blocks[1].hits, blocks[1].below = 2, 5, 3, Below.HELD
    blocks[2].slot = blocks[3].slot = None
    blocks[3].state = BlockState.COMPUTING
    ((node,),) = [root.children for root in tree_of(index, TreeQuery(num_tokens=3)).roots]
    assert [("device", 2), ("host", 1), ("computing", 1)] == node.runs
    assert [("device",), ("device", "disk")] == node.tiers[:2]
    assert {"device": 2, "disk": 1} == node.num_in
    assert (1, 1, 5) == (node.num_in_use, node.num_clean, node.hits)
    (told,) = tree_json(tree_of(index, TreeQuery(num_tokens=3)))["scopes"][0]["nodes"]
    assert [0, 1, 2] == told["token_ids"]
    assert {"place": "device", "num_blocks": 2} == told["runs"][0]
    assert blocks[3].key is not None and blocks[3].key.hex() == told["last_key"]


def test_a_tree_may_begin_at_any_prefix():
    index = index_of([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8])
    key = Chain(ROOT, [1, 2, 3, 4], BLOCK).keys[1]
    (root,) = tree_of(index, TreeQuery(roots=(key,))).roots
    assert (0, [(2, []), (2, [])]) == shape(root)
    (nothing,) = tree_of(index, TreeQuery(roots=(OTHER,))).roots
    assert [] == nothing.children


def test_bounds_hold_and_what_is_left_off_is_told():
    index = index_of(*([n, n, 9, 9] for n in range(20)))
    (root,) = tree_of(index, TreeQuery(max_children=3)).roots
    assert (3, 17) == (len(root.children), root.left_off)
    (root,) = tree_of(index, TreeQuery(max_nodes=5)).roots
    assert (5, 15) == (len(root.children), root.left_off)
    tree = tree_of(index, TreeQuery(max_blocks=3))
    assert (3, 40) == (tree.num_seen, tree.num_blocks)
    (root,) = tree.roots
    assert [2, 1] == [node.num_blocks for node in root.children]
    assert (18, 1) == (root.left_off, root.children[1].left_off)  # cut within a chain, too
    index = index_of([1, 1, 2, 2], [1, 1, 3, 3, 4, 4], [1, 1, 3, 3, 5, 5])
    (root,) = tree_of(index, TreeQuery(depth=2)).roots
    assert [0, 2] == sorted(node.left_off for node in root.children[0].children)


def test_scopes_share_the_room():
    """A tenant whose prompts part at once does not hide those that come after it."""
    index = index_of(*([n, n] for n in range(50)))
    for number in range(3):
        add(index, [number, 1], OTHER)
    busy, other = tree_of(index, TreeQuery(max_nodes=6)).roots
    assert [(3, 47), (3, 0)] == [(len(root.children), root.left_off) for root in (busy, other)]


def test_the_most_hit_are_shown_where_not_all_are():
    index = index_of(*([n, n] for n in range(9)))
    index.match(Chain(ROOT, [4, 4], BLOCK))[0].hits = 3
    (root,) = tree_of(index, TreeQuery(max_children=1, num_tokens=1)).roots
    assert [3] == [node.hits for node in root.children]


def test_blocks_that_cannot_be_reached_are_counted():
    index = BlockIndex()
    index.remove(add(index, [1, 2, 3, 4, 5, 6])[0])
    tree = tree_of(index, TreeQuery())
    assert (2, 0) == (tree.num_blocks, tree.num_seen)
    assert ["2 blocks not shown: left off above, or a block before them is gone"] == list(
        tree_lines(tree_json(tree))
    )


def test_a_drawing_joins_its_lines_and_says_what_is_more():
    index = index_of([1, 1, 2, 2, 6, 6], [1, 1, 2, 2, 7, 7], [3, 3])
    lines = [
        re.sub("─ [0-9a-f]{12} ", "─ * ", line)
        for line in tree_lines(tree_json(tree_of(index, TreeQuery())))
    ]
    assert [
        f"scope {ROOT.hex()}",
        "├─ * 2 blocks, 4 tokens, device",
        "│  ├─ * 1 block, 2 tokens, device",
        "│  └─ * 1 block, 2 tokens, device",
        "└─ * 1 block, 2 tokens, device",
    ] == lines
    grown = tree_json(tree_of(index, TreeQuery(max_nodes=1)))
    lines = list(tree_lines(grown))
    assert ["   └─ 2 more", "└─ 1 more"] == [line.replace("│", " ") for line in lines[2:4]]


@pytest.mark.parametrize(
    "bounds", [{"depth": 0}, {"depth": 65}, {"max_nodes": 0}, {"max_blocks": 0}, {"num_tokens": -1}]
)
def test_bounds_that_show_nothing_are_refused(bounds):
    with pytest.raises(ConfigurationError, match=next(iter(bounds))):
        TreeQuery(**bounds)


SEED = 7


def on_disk(*prompts: list[int], root: PrefixKey = ROOT) -> DiskBlocks:
    """A picture of a disk that holds the full blocks of these prompts."""
    by_key, now_s = {}, int(time.time())
    for prompt in prompts:
        chain = Chain(root, prompt, BLOCK)
        for number, key in enumerate(chain.keys):
            at = {"parent": chain.parent(number), "tokens": chain.chunks[number]}
            when = {"used_s": now_s - 60, "computed_s": now_s - 120}
            by_key[key] = BlockInfo(key=key, stored_bytes=100, scope=root, **at, **when)
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
