"""What loading and computing cost here, and which blocks of a prompt load faster than they compute.

The node measures its tiers, the workers the copies to vLLM, and vLLM's steps tell what a token
takes to compute. The scheduling loop's thread, but for `worth`, which the lookup thread calls.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tiers.tier import TierName
from tiers.transfer.economy import Cost, CostLine, LoadEconomy

FEWEST_TOKENS = 32  # of prompts, in a step that tells what they cost
MOST_STEPS = 16  # under way at once; more than vLLM ever has


@dataclass(slots=True)
class Weigher:
    """The economy of one engine. `loads`: the seconds of a load by its bytes, as a node tells."""

    economy: LoadEconomy
    clock_s: Callable[[], float] = time.perf_counter
    _copies: Cost = field(default_factory=Cost)  # of bytes, from the node's memory to vLLM
    _steps: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=MOST_STEPS))
    _ended_s: float = 0.0  # when the last step was done

    def worth(
        self,
        tiers: Sequence[TierName],
        loads: Mapping[TierName, CostLine],
        *,
        nbytes: float,
        num_tokens: int,
    ) -> int:
        """How many leading blocks to load, of those in these tiers, with so many bytes in all and
        tokens each."""
        if not tiers:
            return 0
        copy = self._copies.line
        lines = {
            tier: CostLine(copy.fixed_s + load.fixed_s, copy.each_s + load.each_s)
            for tier in dict.fromkeys(tiers)
            for load in (loads.get(tier, CostLine()),)
        }
        each = nbytes / len(tiers)
        return self.economy.worth_leading(tiers, lines, block_bytes=each, block_tokens=num_tokens)

    def copied(self, nbytes: int, seconds: float) -> None:
        """Blocks in the node's memory were loaded."""
        self._copies.observe(nbytes, seconds)

    def begun(self, scheduled: Mapping[str, int], *, loads: bool) -> None:
        """vLLM begins a step with so many tokens of each request. `loads`: it waits for blocks."""
        num_tokens = sum(num for num in scheduled.values() if num > 1)  # one: of an answer
        counts = num_tokens >= FEWEST_TOKENS and not loads
        self._steps.append((self.clock_s(), num_tokens if counts else 0))

    def ended(self) -> None:
        """The oldest step is done."""
        if self._steps:
            begun_s, num_tokens = self._steps.popleft()
            now_s = self.clock_s()
            self.economy.compute.observe(num_tokens, now_s - max(begun_s, self._ended_s))
            self._ended_s = now_s
