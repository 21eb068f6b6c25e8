"""All tiers as one forest of prefixes: the live index and the blocks that are only on disk.

`DiskBlocks` is a snapshot of the disk's records and may be taken on any thread. The rest runs on
the engine thread between two steps, bounded by its caller. A block in several tiers is listed once,
under the hottest.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tiers.blocks.keys import PrefixKey
from tiers.blocks.tree import Tree, TreeQuery, grow
from tiers.blocks.view import BlockView
from tiers.disk.inspection.view import BlockInfo, DiskView
from tiers.memory.block import Block
from tiers.memory.index import BlockIndex
from tiers.memory.view import block_view
from tiers.telemetry.misses import Absence, marks_of
from tiers.tier import TierName

MAX_DISK_BLOCKS = 50_000  # in one snapshot: about 35 MB
AnyBlock = Block | BlockInfo


@dataclass(frozen=True, slots=True)
class DiskBlocks:
    """Records by key and by parent. `cut`: the disk holds more records than were read."""

    by_key: Mapping[PrefixKey, BlockInfo] = field(default_factory=dict)
    by_parent: Mapping[PrefixKey, Sequence[BlockInfo]] = field(default_factory=dict)
    cut: bool = False


def read_disk(view: DiskView) -> DiskBlocks:
    """A snapshot of the disk tier. Any thread may take it, at about 10 us a block."""
    by_key: dict[PrefixKey, BlockInfo] = {}
    by_parent: dict[PrefixKey, list[BlockInfo]] = {}
    for block in islice(view.blocks(), MAX_DISK_BLOCKS):
        if block.why is None:
            by_key[block.key] = block
            by_parent.setdefault(block.parent, []).append(block)
    return DiskBlocks(by_key, by_parent, len(by_key) == MAX_DISK_BLOCKS)


def same_start(disk: DiskBlocks, absence: Absence, seed: int) -> tuple[int, PrefixKey | None]:
    """The most leading tokens that a record on disk shares with the missed block, and its key.

    Compares records that continue the same prefix. The missed block's own record is skipped, since
    it may have been stored afterwards. Any thread may call it.
    """
    rows, nearest = 0, None
    for block in disk.by_parent.get(absence.parent, ()):
        if block.key != absence.key:
            common = absence.common(marks_of(block.tokens, seed))
            if common > rows:
                rows, nearest = common, block.key
    return rows, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDetail:
    """One block and its place in its prompt.

    `trail` holds the keys that lead to it, the prompt's first block first. `complete`: they reach
    back to the scope's root. Within the last `run` keys, this block included, no other prefix
    diverges.
    """

    block: BlockView
    stored_bytes: int  # on disk; 0 if it is not there
    trail: tuple[PrefixKey, ...]
    complete: bool
    run: int
    children: tuple[PrefixKey, ...]


class TierForest:
    """The blocks of all tiers. Made anew for each query. Reads the index, so engine thread only."""

    def __init__(self, index: BlockIndex, disk: DiskBlocks) -> None:
        self._index = index
        self._disk = disk
        self._now_s = time.monotonic()
        self._unix_s = time.time()

    # For `tiers.blocks.tree.grow`.

    def scopes(self) -> Iterable[PrefixKey]:
        live = self._index.scopes()
        known = set(live)
        below = (root for root, found in self._disk.by_parent.items() if found[0].scope == root)
        return [*live, *sorted(root for root in below if root not in known)]

    def following(self, key: PrefixKey) -> Sequence[AnyBlock]:
        live = [*self._index.children(key), *self._index.partials(key)]
        get = self._index.get
        return [*live, *(b for b in self._disk.by_parent.get(key, ()) if get(b.key) is None)]

    def rank(self, block: AnyBlock) -> int:
        return block.hits if isinstance(block, Block) else 0

    def look(self, block: AnyBlock) -> BlockView:
        if isinstance(block, BlockInfo):
            return block.view(self._unix_s)
        view = block_view(block, self._now_s)
        if block.key in self._disk.by_key and TierName.DISK not in view.tiers:
            return view._replace(tiers=(*view.tiers, TierName.DISK))
        return view

    def tree(self, query: TreeQuery) -> Tree:
        on_disk = sum(self._index.get(key) is None for key in self._disk.by_key)
        return grow(self, query, len(self._index) + self._index.num_partials + on_disk)

    # One block and its continuations.

    def starting(self, key_start: str, limit: int = 20) -> list[PrefixKey]:
        """Keys that begin with these hex digits."""
        start = key_start.lower()
        live = (block.key for block in self._index if block.key is not None)
        found = (key for key in live if key.hex().startswith(start))
        below = (key for key in self._disk.by_key if key.hex().startswith(start))
        return list(islice(dict.fromkeys([*islice(found, limit), *islice(below, limit)]), limit))

    def detail(self, key: PrefixKey) -> BlockDetail | None:
        live, record = self._index.get(key), self._disk.by_key.get(key)
        block: AnyBlock | None = live or record
        if block is None or block.scope is None or block.parent is None:
            return None
        trail = self._trail(key, block.scope)
        return BlockDetail(
            block=self.look(block),
            stored_bytes=record.stored_bytes if record is not None else 0,
            trail=tuple(trail),
            complete=self._parent(trail[0]) == block.scope,
            run=self._run(trail),
            children=tuple(b.key for b in self.following(key) if b.key is not None),
        )

    def below(self, key: PrefixKey, limit: int) -> list[PrefixKey]:
        """`key` and the keys of its continuations, parents first. At most `limit` keys."""
        keys = [key]
        for parent in keys:
            if len(keys) >= limit:
                break
            keys += [block.key for block in self.following(parent) if block.key is not None]
        return keys[:limit]

    def scopes_with(self, absence: Absence, scope: PrefixKey, seed: int) -> list[PrefixKey]:
        """Other scopes whose prompts begin with the missed block, if it is a prompt's first."""
        if absence.parent != scope or absence.key is None:
            return []
        return [
            root
            for root in self.scopes()
            if root != scope
            and any(absence.is_same(block.tokens, seed) for block in self.following(root))
        ]

    def _parent(self, key: PrefixKey) -> PrefixKey | None:
        block: AnyBlock | None = self._index.get(key) or self._disk.by_key.get(key)
        return block.parent if block is not None else None

    def _run(self, trail: list[PrefixKey]) -> int:
        """How many blocks at the end of the trail have no diverging prefix."""
        for number in range(len(trail) - 1, 0, -1):
            if len(self.following(trail[number - 1])) > 1:
                return len(trail) - number
        return len(trail)

    def _trail(self, key: PrefixKey, scope: PrefixKey) -> list[PrefixKey]:
        trail = [key]
        while True:
            parent = self._parent(trail[-1])
            if parent is None or parent == scope or self._parent(parent) is None:
                return trail[::-1]
            trail.append(parent)
