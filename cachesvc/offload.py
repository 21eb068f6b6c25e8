"""KV that an engine offloads to our disk: what the sockets of vLLM and SGLang share.

An engine's chunk or page is opaque here. It is a record of `tiers.disk`: found by the key that the
engine gave it, verified by that key, our scope and a checksum.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tiers.blocks.frames import Arena, Frame
from tiers.blocks.keys import BlockId, PrefixKey, child_key
from tiers.blocks.layout import ITEM_BYTES, BlockLayout, LayerLayout
from tiers.disk.guest import GuestTier
from tiers.disk.open import open_disk
from tiers.disk.settings import DiskSettings
from tiers.disk.tier import DiskTier
from tiers.errors import DirectoryLocked

NUM_SHARDS = 2
PIECE = 8  # records of a load that one thread reads
_TOKEN_BYTES = 4


class GivenFrames:
    """Memory of an engine, as the frames that the disk reads and fills."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = buffers

    def frames(self) -> list[Frame]:
        return [Frame(cast(Arena, self), number) for number in range(len(self._buffers))]

    def is_lesser(self, number: int) -> bool:
        return False

    def buffer(self, number: int) -> memoryview:
        return self._buffers[number]


def check_options(
    given: Mapping[str, Any], *, needed: Collection[str], known: Collection[str], example: str
) -> None:
    """Raises ValueError for options that are unknown, missing or not of their kind, by name."""
    if unknown := given.keys() - {*needed, *known}:
        raise ValueError(
            f"the cachesvc tier knows no {', '.join(sorted(unknown))}; it has "
            f"{', '.join(sorted({*needed, *known}))}"
        )
    if lacking := set(needed) - given.keys():
        raise ValueError(
            f"the cachesvc tier needs {' and '.join(sorted(lacking))}, as in {example}"
        )
    for name in ("compress", "enable_kv_events"):
        if not isinstance(value := given.get(name, True), bool):
            raise ValueError(f"the cachesvc tier's {name} is true or false, not {value!r}")


def opaque_layout(num_bytes: int, dtype: str) -> BlockLayout:
    """A record of opaque bytes, of numbers as large as those of `dtype`. Raises ValueError."""
    name = dtype if dtype in ITEM_BYTES else "float16"
    size, rest = divmod(num_bytes, ITEM_BYTES[name])
    if rest or not size:
        raise ValueError(f"the cachesvc tier cannot be used: {num_bytes} bytes are no {name}")
    return BlockLayout((LayerLayout(1, size, size, shared=True, rows=1),), 1, name)


def opaque_id(root: PrefixKey, key: bytes) -> BlockId:
    """The engine's key takes the place of a block's tokens: it is compared whole at each hit."""
    tokens = key + bytes(-len(key) % _TOKEN_BYTES)
    return BlockId(root, root, child_key(root, tokens), tokens)


def open_folder(
    folder: Path, capacity_bytes: int, layout: BlockLayout, *, compresses: bool
) -> DiskTier:
    """Raises DirectoryLocked and ConfigurationError, which say how to mend it."""
    settings = DiskSettings(computes_elsewhere=True, compresses=compresses)
    try:
        return open_disk(folder, layout, capacity_bytes, num_shards=NUM_SHARDS, settings=settings)
    except DirectoryLocked as error:
        raise DirectoryLocked(
            f"{error}. Each engine needs a dir of its own; engines that share blocks have a "
            "`cachesvc node` and vLLM's CachesvcConnector"
        ) from None


def load_all(
    disk: DiskTier | GuestTier, ids: Sequence[BlockId], frames: Sequence[Frame]
) -> list[bool]:
    """Fills the frames whose records can be served, and says which. Reader threads."""
    served = [False] * len(ids)
    at = 0
    while at < len(ids):
        num_blocks = disk.load(ids[at:], frames[at:]).num_blocks
        served[at : at + num_blocks] = [True] * num_blocks
        at += num_blocks + 1  # the one that cannot be served is a miss
    return served
