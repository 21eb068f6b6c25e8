"""Adaptive: learns which runs of blocks come back, and when. It evicts the least valuable.

Blocks that are used together form a node of a prefix tree. The policy learns by node and evicts by
block, from the tail of a leaf. The learner sees what a serving cache knows and a page cache does
not: the turn, the depth, how much of the prompt was new, and how often and how regularly the node
was used. A shadow LRU of the same capacity guards it. If the shadow's hits lead by more than a
small share of all uses, blocks leave in LRU order until that lead has shrunk.

    uses of a request ─► flush ─► its nodes ─► ReuseModel.levels ─► buckets by level ─► victim
                                     └─ the wait that ended ─► ReuseModel.learn
"""

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Generic

from tiers.policy.policy import K, Use
from tiers.policy.prefix_node import PrefixRun
from tiers.policy.reuse_model import (
    AGE_ENDS,
    NUM_AGES,
    NUM_LEVELS,
    NUM_ROWS,
    ReuseModel,
    Rows,
    interval,
    row,
)
from tiers.policy.shadow import ShadowLru

_ENDS = [float(end) for end in AGE_ENDS]
_LEARN_AT = frozenset((2, 4, 7, 10, 13, 16, 19, 22))  # ages at which a wait is learned from
_NUM_FEATURES = 13
_REGRET = 0.002  # share of the uses by which the shadow LRU may lead
_MEMORY = 200_000  # uses after which the comparison with the shadow has half its weight
_MIN_GHOSTS = 16_384
# Bounds on the cost of one request, besides 2 us for each of its blocks. Agents on a small device
# have 20 nodes and 60 outcomes a request. After a pause, thousands of nodes enter another age.
_MAX_LEARNED = 64  # outcomes; the rest of a wait is learned at its next age or its end
_MAX_AGED = 384  # nodes moved to their current age; the next request moves the others
_MAX_JUDGED = 32  # the deepest nodes are judged again; those above are used often and change slowly

_Pending = tuple[K, K | None, int]  # key, parent, depth (-1: unknown)
_Aging = tuple[float, PrefixRun[K], int]  # time of its next age, the node, its serial at that time


class Adaptive(Generic[K]):
    """Invariants: a node in a bucket is a leaf. A leaf in no bucket is parked because its tail is
    held. A parent stays while a child has resident blocks.

    A request costs about 100 us for its three or four nodes and 1 us for each block. A victim costs
    1 us. Memory: 200 bytes a block and 600 a node, with up to max(16,384, 4 x capacity) nodes as
    ghosts.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._nodes: dict[K, PrefixRun[K]] = {}  # resident blocks
        self._ghosts: OrderedDict[K, PrefixRun[K]] = (
            OrderedDict()
        )  # evicted nodes by head, oldest first
        self._max_ghosts = max(_MIN_GHOSTS, 4 * capacity_blocks)
        self._held: set[K] = set()
        self._pending: list[_Pending[K]] = []  # uses of one request, tail first
        self._use: Use | None = None
        self._now_s = 0.0
        self._num_learned = self._num_aged = 0  # by the request being processed
        self.num_judged = 0  # nodes, by all requests
        self._model = ReuseModel(_NUM_FEATURES)
        self._shadow: ShadowLru[K] = ShadowLru(capacity_blocks, _REGRET, _MEMORY)
        self._recency: OrderedDict[PrefixRun[K], None] = (
            OrderedDict()
        )  # resident nodes, oldest first
        self._buckets: list[OrderedDict[PrefixRun[K], None]] = [
            OrderedDict() for _ in range(NUM_LEVELS)
        ]
        self._lowest = NUM_LEVELS  # no bucket below holds a node
        self._aging: list[deque[_Aging[K]]] = [
            deque(maxlen=4 * self._max_ghosts) for _ in range(NUM_AGES)
        ]

    def insert(self, key: K, use: Use, parent: K | None = None, depth: int = 0) -> None:
        if use is not self._use:
            self._flush()
            self._use = use
        self._pending.append((key, parent, depth))

    def hold(self, key: K) -> None:
        self._flush()
        self._held.add(key)

    def release(self, key: K, use: Use) -> None:
        self._held.discard(key)
        self.touch(key, use)

    def touch(self, key: K, use: Use) -> None:
        if use is not self._use:
            self._flush()
            self._use = use
        self._pending.append((key, None, -1))

    def remove(self, key: K) -> None:
        self._flush()
        self._held.discard(key)
        node = self._nodes.get(key)
        if node is not None:
            node.blocks.remove(key)
            self._left(node, key)

    def victim(self) -> K | None:
        self._flush()
        node = self._oldest() if self._shadow.is_ahead else self._least_worth()
        if node is None:
            return None
        key = node.blocks.pop()
        self._left(node, key)
        return key

    def coldest(self, count: int) -> list[K]:
        self._flush()
        order = self._recency if self._shadow.is_ahead else self._by_worth()
        keys = (key for node in order for key in reversed(node.blocks) if key not in self._held)
        return list(islice(keys, count))

    # Choosing.

    def _least_worth(self) -> PrefixRun[K] | None:
        """A leaf of the lowest level whose tail is not held. Parks leaves with a held tail."""
        while self._lowest < NUM_LEVELS:
            bucket = self._buckets[self._lowest]
            if not bucket:
                self._lowest += 1
                continue
            node = next(iter(bucket))
            if node.blocks[-1] not in self._held:
                return node
            self._unplace(node)
        return None

    def _oldest(self) -> PrefixRun[K] | None:
        """The least recently used node. It is a leaf, because using a child uses its parent."""
        for _ in range(len(self._recency)):
            node = next(iter(self._recency))
            if node.blocks[-1] not in self._held and not node.num_children:
                return node
            self._recency.move_to_end(node)
        return None

    def _by_worth(self) -> Iterator[PrefixRun[K]]:
        for bucket in self._buckets[self._lowest :]:
            yield from bucket

    def _place(self, node: PrefixRun[K]) -> None:
        """Put a node in the bucket of its current worth, or in none if it is not a candidate."""
        self._unplace(node)
        if node.num_children or not node.blocks:
            return
        node.bucket = node.levels[node.age]
        self._buckets[node.bucket][node] = None
        self._lowest = min(self._lowest, node.bucket)

    def _unplace(self, node: PrefixRun[K]) -> None:
        if node.bucket >= 0:
            del self._buckets[node.bucket][node]
            node.bucket = -1

    def _left(self, node: PrefixRun[K], key: K) -> None:
        """Take in that `key` is no longer among the blocks of `node`."""
        del self._nodes[key]
        if node.blocks:
            if node.bucket < 0:
                self._place(node)
            return
        self._unplace(node)
        del self._recency[node]
        self._ghosts[node.head] = node
        if len(self._ghosts) > self._max_ghosts:
            _, forgotten = self._ghosts.popitem(last=False)
            forgotten.serial = -1
        parent, node.parent = node.parent, None
        if parent is not None:
            parent.num_children -= 1
            if not parent.num_children:
                self._place(parent)

    # Using.

    def _flush(self) -> None:
        """Process the uses of one request."""
        if not self._pending:
            return
        use = self._use
        assert use is not None, "uses are pending and no request made them"
        chain, self._pending = self._pending[::-1], []
        self._now_s = max(self._now_s, use.time_s)
        self._num_learned = self._num_aged = 0
        self._grow_older()
        keys = [key for key, _, _ in chain]
        num_hit = next((i for i, key in enumerate(keys) if key not in self._nodes), len(keys))
        self._shadow.use(keys, num_hit)
        nodes, num_known = self._walk(chain, keys)
        self._renew(nodes, num_known, use)

    def _grow_older(self) -> None:
        """Move nodes to their current age. Each enters an age once per wait."""
        now_s = self._now_s
        for age, queue in enumerate(self._aging[:-1], start=1):
            while queue and queue[0][0] <= now_s and self._num_aged < _MAX_AGED:
                _, node, serial = queue.popleft()
                self._num_aged += 1
                if node.serial != serial:
                    continue
                node.age = age
                if age in _LEARN_AT:
                    self._learn(node, age, reused=False)
                self._aging[age].append((node.last_s + _ENDS[age], node, serial))
                if node.bucket >= 0 and node.bucket != node.levels[age]:
                    self._place(node)

    def _walk(
        self, chain: Sequence[_Pending[K]], keys: Sequence[K]
    ) -> tuple[list[PrefixRun[K]], int]:
        """The nodes that a chain passes through, head first, and how many of its blocks were
        known."""
        nodes: list[PrefixRun[K]] = []
        num_known = start = 0
        first_parent = chain[0][1]
        above = self._nodes.get(first_parent) if first_parent is not None else None
        while start < len(keys):
            key, _, depth = chain[start]
            node = self._nodes.get(key)
            if node is not None:
                size = node.count_run(keys, start)
                if size < len(node.blocks) and node.head == key:
                    node = self._split(node, size)
                num_known = start + size
            else:
                size = self._count_new(keys, start)
                ghost = self._ghosts.pop(key, None)
                if ghost is not None:
                    node = ghost
                    size = node.length = min(size, node.length)
                    num_known = start + size
                elif nodes and above is not None and above.num_missing:
                    size = min(size, above.num_missing)
                    num_known = start + size
                    self._settle(above, keys[start : start + size])
                    start += size
                    continue
                else:
                    if start + size == len(keys) and size > 1:
                        size -= 1  # the last block gets its own node, as it may be partial
                    node = PrefixRun(keys[start], size, max(0, depth) + size, self._now_s)
                self._join(node, above)
                self._settle(node, keys[start : start + size])
            nodes.append(node)
            above = node
            start += size
        return nodes, num_known

    def _count_new(self, keys: Sequence[K], start: int) -> int:
        """How many blocks from `start` on are neither resident nor the head of another ghost."""
        end = start + 1
        while end < len(keys) and keys[end] not in self._nodes and keys[end] not in self._ghosts:
            end += 1
        return end - start

    def _join(self, node: PrefixRun[K], parent: PrefixRun[K] | None) -> None:
        """Link a node that is about to get its first resident blocks below `parent`."""
        node.parent = parent
        if parent is not None:
            parent.num_children += 1
            self._unplace(parent)
        self._recency[node] = None

    def _settle(self, node: PrefixRun[K], keys: Sequence[K]) -> None:
        node.blocks += keys
        for key in keys:
            self._nodes[key] = node

    def _split(self, node: PrefixRun[K], size: int) -> PrefixRun[K]:
        """Split off the leading `size` blocks into a new node, the parent of the rest."""
        upper = node.split(size)
        for key in upper.blocks:
            self._nodes[key] = upper
        self._recency[upper] = None
        return upper

    def _renew(self, nodes: Sequence[PrefixRun[K]], num_known: int, use: Use) -> None:
        """Renew the nodes that a request used: learn from the wait that ended, and judge the next
        one."""
        now_s = self._now_s
        known = [node for node in nodes if node.uses]
        pause_s = now_s - known[-1].last_s if known else 0.0
        turn = known[-1].turn + 1 if known else 1
        above, judged = nodes[:-_MAX_JUDGED], nodes[-_MAX_JUDGED:]
        for node in judged:
            wait_s = now_s - node.last_s
            self._learn(node, interval(wait_s) + 1, reused=True)
            node.uses += 1
            node.turn = turn
            node.rows = self._features(node, wait_s, pause_s, num_known, use)
        for node in above:
            node.uses += 1
            node.turn = turn
        self.num_judged += len(judged)
        levels = [node.levels for node in above]
        levels += self._model.levels([node.rows for node in judged])
        worth = bytes(NUM_AGES)
        for node, own in zip(reversed(nodes), reversed(levels), strict=True):
            worth = bytes(map(max, worth, own))  # a parent is worth as much as its best child
            node.begin_wait(now_s, worth)
            self._aging[0].append((now_s + _ENDS[0], node, node.serial))
            self._recency.move_to_end(node)
            self._place(node)

    def _learn(self, node: PrefixRun[K], end: int, *, reused: bool) -> None:
        """Learn from a wait up to interval `end`, within the bound on one request's outcomes. A
        node that was never judged has nothing to learn from."""
        if node.rows and self._num_learned < _MAX_LEARNED:
            self._num_learned += 1
            self._model.learn(node.outcome(end, reused=reused))

    def _features(
        self, node: PrefixRun[K], wait_s: float, pause_s: float, num_known: int, use: Use
    ) -> Rows:
        num_blocks = use.num_blocks
        is_tail = node.end >= num_blocks
        return (
            row(node.length),
            row(node.end - node.length),
            row(num_blocks),
            row(num_blocks - node.end),
            row(num_known),
            row(num_blocks - num_known),
            row(node.uses),
            row(node.turn),
            row(pause_s),
            row(wait_s),
            row(self._now_s - node.born_s),
            is_tail + 2 * (node.uses > 1) + 4 * (num_blocks <= 2),
            0 if use.tenant is None else 1 + hash(use.tenant) % (NUM_ROWS - 1),
        )
