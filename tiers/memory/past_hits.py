"""Counts of hits that outlive their blocks in memory. For people, not for policies.

`BlockIndex` notes a block's hits when the block leaves. The server keeps the counts across a
restart.
"""

import struct
from collections.abc import Iterable

from tiers.blocks.keys import KEY_BYTES, PrefixKey

MAX_KEYS = 1 << 16  # some 10 MB
_PAIR = struct.Struct(f"<{KEY_BYTES}sQ")


class PastHits:
    """Hits by key. Bounded: the key noted longest ago is dropped first."""

    def __init__(self) -> None:
        self._hits: dict[PrefixKey, int] = {}

    def of(self, key: PrefixKey | None) -> int:
        return self._hits.get(key, 0) if key is not None else 0

    def note(self, key: PrefixKey, hits: int) -> None:
        known = self._hits
        known[key] = known.pop(key, 0) + hits
        if len(known) > MAX_KEYS:
            del known[next(iter(known))]

    def dump(self, current: Iterable[tuple[PrefixKey, int]]) -> bytes:
        """Serialize all counts, with the `current` hits of blocks in memory added."""
        whole = PastHits()
        for key, hits in (*self._hits.items(), *current):
            whole.note(key, hits)
        return b"".join(_PAIR.pack(*pair) for pair in whole._hits.items())

    def restore(self, body: bytes) -> None:
        """Read what `dump` wrote. Raises ValueError for anything else."""
        if len(body) % _PAIR.size:
            raise ValueError(f"{len(body)} bytes are not a whole number of pairs of {_PAIR.size}")
        for key, hits in _PAIR.iter_unpack(body):
            self.note(PrefixKey(key), hits)
