"""Records why the first missed block of a prompt was absent, as far as the cache can know.

Made on the engine thread at a request's first admission and kept with the request for later
reports. Only marks of the tokens are kept: digests under a seed that exists only in this process.
They show where another prompt diverges from this one, and cannot be turned back into tokens.
"""

import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from tiers.blocks.keys import TOKEN_BYTES, PrefixKey
from tiers.tier import Cause, TierName

MAX_EVICTED_KEYS = 65_536  # about 200 bytes each: 13 MB when full


class Departure(NamedTuple):
    """How the last copy of a block left the cache. `at_s` is Unix time."""

    tier: TierName
    cause: Cause
    at_s: float


class EvictedKeys:
    """The blocks that left the cache most recently, by key."""

    def __init__(self, max_keys: int = MAX_EVICTED_KEYS) -> None:
        self._max = max_keys
        self._left: OrderedDict[PrefixKey, Departure] = OrderedDict()

    def __len__(self) -> int:
        return len(self._left)

    def note(self, key: PrefixKey, tier: TierName, cause: Cause) -> None:
        """Note that the last copy of `key` left `tier`, in place of an earlier time."""
        self._left[key] = Departure(tier, cause, time.time())
        self._left.move_to_end(key)
        if len(self._left) > self._max:
            self._left.popitem(last=False)

    def find(self, key: PrefixKey) -> Departure | None:
        return self._left.get(key)


MARK_BYTES = 8


@dataclass(frozen=True, slots=True)
class Absence:
    """The missed block's place, and what is known about it.

    `key` is None for a block that the prompt does not fill. Its first `rows` tokens are held above
    the disk by `sibling`, or by a partly filled block if that is None. After them the sibling
    diverges (`parted`) or ends. `rows` is 0 if no block there begins the same way. `marks` are
    digests of its leading tokens.
    """

    parent: PrefixKey
    key: PrefixKey | None
    departure: Departure | None = None
    rows: int = 0
    parted: bool = False
    sibling: PrefixKey | None = None
    marks: bytes = b""

    def common(self, marks: bytes) -> int:
        """How many leading tokens a block with these marks shares with the missed one."""
        ours, theirs = _split(self.marks), _split(marks)
        rows = 0
        for mine, other in zip(ours, theirs, strict=False):
            if mine != other:
                break
            rows += 1
        return rows

    def is_same(self, tokens: bytes, seed: int) -> bool:
        """Whether `tokens` are exactly the missed block's tokens."""
        return xxhash.xxh3_64_digest(tokens, seed) == self.marks[-MARK_BYTES:]


def marks_of(tokens: bytes, seed: int) -> bytes:
    """One mark for each leading run of these tokens, shortest first."""
    hasher = xxhash.xxh3_64(seed=seed)
    marks = bytearray()
    for start in range(0, len(tokens), TOKEN_BYTES):
        hasher.update(tokens[start : start + TOKEN_BYTES])
        marks += hasher.digest()
    return bytes(marks)


def _split(marks: bytes) -> Iterator[bytes]:
    return (marks[start : start + MARK_BYTES] for start in range(0, len(marks), MARK_BYTES))
