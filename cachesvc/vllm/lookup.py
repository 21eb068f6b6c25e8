"""The longest prefix from which every group of layers can resume, by what the node holds.

Groups that need all blocks bound it. The others need only what lies before its end, so each block
that one of them lacks moves the end before that block. Lookup thread.
"""

from collections.abc import Callable, Sequence

from cachesvc.vllm.chains import RankIds, RequestChains
from cachesvc.vllm.groups import KvGroup, alignment
from tiers.blocks.keys import BlockId
from tiers.tier import TierName

MAX_LOOKS = 256  # at the node, for windows and states; after that the prompt is a miss
_ORDER = tuple(TierName)

Probe = Callable[[int, RankIds], list[TierName]]  # the tiers of the leading blocks of a group


def probe_ranks(
    probe: Callable[[Sequence[BlockId]], list[TierName]], runs: RankIds
) -> list[TierName]:
    """The tiers of the leading blocks of which every rank has its part: the farther one's."""
    tiers = probe(runs[0])
    for run in runs[1:]:
        found = probe(run[: len(tiers)])
        tiers = [max(pair, key=_ORDER.index) for pair in zip(tiers, found, strict=False)]
    return tiers


def longest_prefix(
    groups: Sequence[KvGroup], probe: Probe, chains: RequestChains, start: int, end: int
) -> list[TierName]:
    """The tiers of the first group's blocks from `start` to the end of the longest prefix that can
    be loaded, at most `end`. Both are in tokens. `start` ends a block of every group, and so does
    `end` where no group needs all blocks."""
    step = alignment(groups)

    def look(number: int, begin: int, stop: int) -> tuple[int, list[TierName]]:
        """The tiers of a group's blocks from token `begin`, and the token to which they reach."""
        size = groups[number].block_size
        tiers = probe(number, chains.ids(number, begin // size, stop // size))
        return begin // size * size + len(tiers) * size, tiers

    found: dict[int, tuple[int, list[TierName]]] = {}  # by group: where they begin, and tiers
    whole = [number for number, group in enumerate(groups) if group.is_whole]
    for number in whole:
        reached, tiers = look(number, start, end)
        found[number], end = (start, tiers), min(end, reached // step * step)
    others = [number for number in range(len(groups)) if number not in whole]
    looks, settled = 0, 0  # how many of the others, in turn, have what they need at `end`
    while start < end and settled < len(others):
        if looks == MAX_LOOKS:
            return []
        number = others[looks % len(others)]
        begin = max(start, groups[number].first(end) * groups[number].block_size)
        reached, tiers = look(number, begin, end)
        found[number], looks = (begin, tiers), looks + 1
        settled = settled + 1 if reached == end else 0
        end = min(end, reached // step * step)
    return _tiers_of(groups, found, start, end)


def _tiers_of(
    groups: Sequence[KvGroup], found: dict[int, tuple[int, list[TierName]]], start: int, end: int
) -> list[TierName]:
    """The tier of each of the first group's blocks: the farthest that has a part of it.

    Without a group that needs all blocks, it is the farthest of all.
    """
    size = groups[0].block_size
    places = [0] * ((end - start) // size if end > start else 0)
    for number, (begin, tiers) in found.items():
        width = groups[number].block_size
        for block, tier in enumerate(tiers):
            first = (begin + block * width - start) // size
            last = (begin + (block + 1) * width - start - 1) // size
            for place in range(first, min(last + 1, len(places))):
                places[place] = max(places[place], _ORDER.index(tier))
    if places and not groups[0].is_whole:
        places = [max(places)] * len(places)
    return [_ORDER[place] for place in places]
