"""A prefix in a node, as all of its parts: those of every group of KV, on every rank.

Operators name a prefix by its tokens. Blocks of other groups and ranks than the first have keys of
their own, which follow from the tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cachesvc.vllm.chains import RequestChains
from cachesvc.vllm.groups import KvGroup, alignment
from cachesvc.vllm.identity import roots_of
from cachesvc.vllm.lookup import longest_prefix, probe_ranks
from tiers.blocks.chain import Chain
from tiers.blocks.keys import TOKEN_BYTES, BlockId, PrefixKey
from tiers.blocks.layout import BlockLayout
from tiers.node.client import NodeClient
from tiers.tier import TierName

# The tiers of the leading blocks of a run, of this layout.
Held = Callable[[BlockLayout, Sequence[BlockId]], list[TierName]]
KeysByLayout = dict[BlockLayout, list[PrefixKey]]


class Nodes:
    """Connections to the node at `socket`, one for each layout that is asked for. One thread.

    Everything raises NodeError; what is asked next connects again.
    """

    def __init__(self, socket: Path, timeout_s: float) -> None:
        self._socket = socket
        self._timeout_s = timeout_s
        self._nodes: dict[BlockLayout, NodeClient] = {}

    def __getitem__(self, layout: BlockLayout) -> NodeClient:
        node = self._nodes.get(layout)
        if node is None:
            node = NodeClient(self._socket, layout, timeout_s=self._timeout_s, maps=False)
            self._nodes[layout] = node
        if not node.is_connected:
            node.connect()
        return node

    def held(self, layout: BlockLayout, run: Sequence[BlockId]) -> list[TierName]:
        """The tiers of the leading blocks that the node has."""
        return self[layout].probe(run)

    def sent(self, layout: BlockLayout, run: Sequence[BlockId]) -> list[TierName]:
        """Send these blocks to the store. Returns as many tiers as leading ones are there."""
        return [TierName.REMOTE] * self[layout].publish(run)

    def close(self) -> None:
        for node in self._nodes.values():
            node.close()


@dataclass(frozen=True, slots=True)
class KvParts:
    """The parts of an engine's KV. Prefixes are counted in the blocks of the first group."""

    groups: tuple[KvGroup, ...]
    num_ranks: int

    @property
    def layouts(self) -> list[BlockLayout]:
        """Each layout once, the first group's first."""
        return list(dict.fromkeys(group.layout for group in self.groups))

    def roots(self, root: PrefixKey) -> list[list[PrefixKey]]:
        """Of a scope's blocks: for each group, on each rank."""
        return roots_of(root, self.groups, self.num_ranks)


class KvPrefix:
    """The parts of one prefix, made when they are needed."""

    def __init__(self, parts: KvParts, chain: Chain) -> None:
        tokens = b"".join(chain.chunks) + chain.tail
        self._groups = parts.groups
        self._chains = RequestChains(parts.groups, parts.roots(chain.root), tokens)
        self._num_tokens = len(tokens) // TOKEN_BYTES

    def held(self, held: Held) -> int:
        """The number of leading blocks from whose end every group can resume, by what is `held`."""

        def probe(number: int, runs: tuple[tuple[BlockId, ...], ...]) -> list[TierName]:
            layout = self._groups[number].layout
            return probe_ranks(lambda run: held(layout, run), runs)

        end = self._num_tokens // alignment(self._groups) * alignment(self._groups)
        return len(longest_prefix(self._groups, probe, self._chains, 0, end))

    def is_whole(self, held: Held) -> bool:
        """Whether all blocks of the groups that need them all are `held`."""
        for number, group in enumerate(self._groups):
            for run in self._chains.ids(number, 0, self._num_tokens // group.block_size):
                if group.is_whole and len(held(group.layout, run)) < len(run):
                    return False
        return True

    def keys_to_resume(self, held: Held) -> KeysByLayout:
        """The keys to keep so that prompts resume from this prefix: of groups that need them all,
        of windows and states those at its end, and at the end that is `held` now.

        Those of the first group on the first rank come first.
        """
        step = alignment(self._groups)
        last = self._num_tokens // step * step
        same = max(0, self._num_tokens - 1) // step * step  # of a prompt that has no more tokens
        ends = {same, last}
        if any(not group.is_whole for group in self._groups):
            ends.add(self.held(held) * self._groups[0].block_size)
        found: dict[BlockLayout, dict[PrefixKey, None]] = {}
        for number, group in enumerate(self._groups):
            size = group.block_size
            places = set(range(self._num_tokens // size if group.is_whole else 0))
            places |= {n for end in ends for n in range(group.first(end), end // size)}
            keys = found.setdefault(group.layout, {})
            for run in self._chains.ids(number, 0, self._num_tokens // size):
                keys.update(dict.fromkeys(run[place].key for place in sorted(places)))
        return {layout: list(keys) for layout, keys in found.items()}
