"""What the engine core and the workers tell each other: blocks to move, and what was moved."""

from dataclasses import dataclass, field
from itertools import pairwise

from cachesvc.vllm.chains import RankIds
from tiers.blocks.keys import BlockId


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """Blocks of one group. `ids[r][i]` is rank r's part of block i, or that of all if there is one;
    `blocks` are vLLM's numbers."""

    group: int
    ids: RankIds
    blocks: tuple[int, ...]

    def part(self, rank: int) -> tuple[BlockId, ...]:
        """What this rank loads."""
        return self.ids[rank if len(self.ids) > 1 else 0]

    def runs(self, rank: int) -> list[tuple[int, int]]:
        """The bounds of the runs of consecutive blocks that this rank stores."""
        ids = self.ids[rank] if rank < len(self.ids) else ()
        breaks = [n for n in range(1, len(ids)) if ids[n].parent != ids[n - 1].key]
        bounds = [0, *breaks, len(ids)]
        return list(pairwise(bounds)) if ids else []


@dataclass(frozen=True, slots=True)
class Transfer:
    """Pieces to move between the node and vLLM. A load has the name of its request. Blocks that the
    node is still loading itself are moved `in_parts`, as they come. The step that computes with
    them waits for a load `in_step`."""

    name: str
    pieces: tuple[GroupBlocks, ...]
    in_parts: bool = False
    in_step: bool = False


@dataclass(slots=True)
class Transferred:
    """Ended transfers by name. A load that lacks anything has failed; `failed_blocks` are those
    that were not loaded, where vLLM can compute them alone. `load_s` are the seconds of each load,
    also of those in a step, which `loaded` lacks: vLLM waits for no word of them."""

    loaded: set[str] = field(default_factory=set)
    load_s: dict[str, float] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)
    saved: list[str] = field(default_factory=list)
