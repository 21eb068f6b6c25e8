"""A sample of the keys of blocks on disk, in order of use.

The writer thread takes one at the server's start, and `tiers.telemetry.working_set` continues from
it.
"""

from collections.abc import Iterable

from tiers.blocks.keys import PrefixKey
from tiers.disk.format.record import is_window
from tiers.disk.shard import Shard
from tiers.tier import Sample

WHOLE = 1 << 32
ROWS = 4096  # of one read transaction

Use = tuple[int, PrefixKey]  # time and key


def sample_of(shards: Iterable[Shard], max_keys: int) -> Sample:
    """At most `max_keys` of the blocks in these shards."""
    uses: list[Use] = []
    bound = WHOLE
    for shard in shards:
        after = 0
        while rows := shard.uses(after, ROWS):
            after = rows[-1][0]
            blocks = [(used_s, key) for _, key, used_s in rows if not is_window(key)]
            uses += [use for use in blocks if hash_of(use[1]) < bound]
            if len(uses) > 2 * max_keys:
                uses, bound = thinned(uses, max_keys, bound)
    return in_order(uses, max_keys, bound)


def in_order(uses: list[Use], max_keys: int, bound: int) -> Sample:
    """The sample of these uses. Uses in the same second keep their order."""
    uses, bound = thinned(uses, max_keys, bound)
    uses.sort(key=lambda use: use[0])
    return Sample(tuple(key for _, key in uses), bound)


def thinned(uses: list[Use], max_keys: int, bound: int) -> tuple[list[Use], int]:
    """The uses under a lower bound, if there are more than `max_keys`."""
    if len(uses) <= max_keys:
        return uses, bound
    bound = sorted(hash_of(key) for _, key in uses)[max_keys]
    return [use for use in uses if hash_of(use[1]) < bound], bound


def hash_of(key: PrefixKey) -> int:
    return int.from_bytes(key[:4], "little")
