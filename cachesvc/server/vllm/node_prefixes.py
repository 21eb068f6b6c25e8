"""A prefix in a node, as all of its parts: those of every group of KV, on every rank.

Operators name a prefix by its tokens. Blocks of other groups and ranks than the first have keys of
their own, which follow from the tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cachesvc.vllm.chains import RequestChains
from cachesvc.vllm.groups import KvGroup, alignment
from cachesvc.vllm.identity import group_roots, rank_roots
from cachesvc.vllm.lookup import longest_prefix, probe_ranks
from tiers.blocks.chain import Chain
from tiers.blocks.keys import TOKEN_BYTES, BlockId, PrefixKey
from tiers.blocks.layout import BlockLayout
from tiers.tier import TierName

# The tiers of the leading blocks of a run, of this layout.
Held = Callable[[BlockLayout, Sequence[BlockId]], list[TierName]]
KeysByLayout = dict[BlockLayout, list[PrefixKey]]


@dataclass(frozen=True, slots=True)
class KvParts:
    """The parts of an engine's KV. Prefixes are counted in the blocks of the first group."""

    groups: tuple[KvGroup, ...]
    num_ranks: int

    @property
    def layouts(self) -> list[BlockLayout]:
        """Each layout once, the first group's first."""
        return list(dict.fromkeys(group.layout for group in self.groups))

    @property
    def are_one(self) -> bool:
        """Whether the keys of the first group on the first rank are all there are."""
        return len(self.groups) == self.num_ranks == 1

    def roots(self, root: PrefixKey) -> list[list[PrefixKey]]:
        """Of a scope's blocks: for each group, on each rank."""
        return [rank_roots(each, self.num_ranks) for each in group_roots(root, len(self.groups))]

    def prefix(self, chain: Chain) -> "KvPrefix":
        tokens = b"".join(chain.chunks) + chain.tail
        return KvPrefix(self, chain.root, tokens)


class KvPrefix:
    """The parts of one prefix, made when they are needed."""

    def __init__(self, parts: KvParts, root: PrefixKey, tokens: bytes) -> None:
        self._groups = parts.groups
        self._chains = RequestChains(parts.groups, parts.roots(root), tokens)
        self.num_tokens = len(tokens) // TOKEN_BYTES
        self.num_blocks = self.num_tokens // parts.groups[0].block_size

    def held(self, held: Held) -> int:
        """The number of leading blocks from whose end every group can resume, by what is `held`."""

        def probe(number: int, runs: tuple[tuple[BlockId, ...], ...]) -> list[TierName]:
            layout = self._groups[number].layout
            return probe_ranks(lambda run: held(layout, run), runs)

        end = self.num_tokens // alignment(self._groups) * alignment(self._groups)
        return len(longest_prefix(self._groups, probe, self._chains, 0, end))

    def is_whole(self, held: Held) -> bool:
        """Whether all blocks of the groups that need them all are `held`."""
        for number, group in enumerate(self._groups):
            for run in self._chains.ids(number, 0, self.num_tokens // group.block_size):
                if group.is_whole and len(held(group.layout, run)) < len(run):
                    return False
        return True

    def keys_to_resume(self, held: Held) -> KeysByLayout:
        """The keys to keep so that prompts resume from this prefix: of groups that need them all,
        of windows and states those at its end, and at the end that is `held` now.

        Those of the first group on the first rank come first.
        """
        step = alignment(self._groups)
        last = self.num_tokens // step * step
        same = max(0, self.num_tokens - 1) // step * step  # of a prompt that has no more tokens
        ends = {same, last}
        if any(not group.is_whole for group in self._groups):
            ends.add(self.held(held) * self._groups[0].block_size)
        found: dict[BlockLayout, dict[PrefixKey, None]] = {}
        for number, group in enumerate(self._groups):
            size = group.block_size
            places = set(range(self.num_tokens // size if group.is_whole else 0))
            places |= {n for end in ends for n in range(group.first(end), end // size)}
            keys = found.setdefault(group.layout, {})
            for run in self._chains.ids(number, 0, self.num_tokens // size):
                keys.update(dict.fromkeys(run[place].key for place in sorted(places)))
        return {layout: list(keys) for layout, keys in found.items()}
