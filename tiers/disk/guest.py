"""The blocks of a folder that another process writes, for a process that reads alone.

It takes no lock and uses no LMDB, so the writer does not know of it. What it finds in pages that
were written over meanwhile is inconsistent, and a miss. Records are verified as always. Any thread.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import cast

from tiers.blocks.frames import Frame
from tiers.blocks.keys import BlockId, PrefixKey
from tiers.blocks.layout import BlockLayout
from tiers.disk.counts import DiskCounts
from tiers.disk.directory import FORMAT, read_meta, shard_of, shard_path
from tiers.disk.reader import BlockReader, Scratch
from tiers.disk.recovery.unchecked import UncheckedShard
from tiers.disk.slot import ShardSlot
from tiers.disk.storage import Storage
from tiers.errors import MissReason
from tiers.tier import Loaded


class _Slot:
    """A shard's place. Each look at it is one at the newest state."""

    def __init__(self, path: Path, map_bytes: int) -> None:
        self.path = path
        self._map_bytes = map_bytes

    @contextmanager
    def read(self) -> Iterator[UncheckedShard]:
        shard = UncheckedShard(self.path, self._map_bytes, Storage())
        try:
            yield shard
        finally:
            shard.close()


class GuestTier:
    """Blocks of one layout in the folder `root`, which need not exist yet."""

    def __init__(self, root: Path, layout: BlockLayout) -> None:
        self._root = root
        self._layout = layout
        self._scratch = Scratch(layout.torch_dtype.itemsize)

    def held(self, keys: Sequence[PrefixKey]) -> list[bool]:
        """Whether each of these is held, by key alone. Raises OSError."""
        with ExitStack() as opened:
            shards = [opened.enter_context(slot.read()) for slot in self._slots()]
            mine = [shards[shard_of(key, len(shards))] for key in keys] if shards else []
            found = [bool(shard.find([key])) for shard, key in zip(mine, keys, strict=False)]
        return found or [False] * len(keys)

    def load(self, ids: Sequence[BlockId], into: Sequence[Frame]) -> Loaded:
        """Fills `into[i]` with block `ids[i]`, verified, up to the first that fails."""
        slots = self._slots()
        if not slots:
            return Loaded(0, MissReason.ABSENT)
        counts = DiskCounts(len(slots), Counter())
        places = cast(list[ShardSlot], slots)
        reader = BlockReader(places, self._layout, self._scratch, counts)
        found, reason = reader.find(ids)
        loaded = reader.load([[place] for place in found], into[: len(found)])
        return Loaded(loaded.num_blocks, loaded.reason or reason)

    def _slots(self) -> list[_Slot]:
        meta = read_meta(self._root)
        if meta is None or meta.format != FORMAT:
            return []
        paths = [shard_path(self._root, number) for number in range(meta.num_shards)]
        return [_Slot(path, meta.map_bytes) for path in paths]
