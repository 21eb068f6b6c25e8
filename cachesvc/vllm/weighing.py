"""What loading and computing cost here, and which blocks of a prompt load faster than they compute.

The node measures its tiers, the workers the copies to vLLM, and vLLM's steps tell what tokens
take to compute. The scheduling loop's thread, but for `worth`, which the lookup thread calls.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tiers.tier import TierName
from tiers.transfer.economy import RETRY_EVERY, Cost, CostLine, LoadEconomy

FEWEST_TOKENS = 32  # of prompts, in a step that tells what they cost
MOST_STEPS = 16  # under way at once; more than vLLM ever has


@dataclass(slots=True)
class Weigher:
    """The economy of one engine. `loads`: the seconds of a load by its bytes, as a node tells."""

    economy: LoadEconomy
    clock_s: Callable[[], float] = time.perf_counter
    _copies: Cost = field(default_factory=Cost)  # of bytes, from the node's memory to vLLM
    _steps: deque[tuple[float, Sequence[tuple[int, int]]]] = field(
        default_factory=lambda: deque(maxlen=MOST_STEPS)
    )
    _ended_s: float = 0.0  # when the last step was done
    _num_slower: int = 0  # prompts since slower tiers were tried

    def worth(
        self,
        tiers: Sequence[TierName],
        loads: Mapping[TierName, CostLine],
        *,
        nbytes: float,
        num_tokens: int,
        start: int = 0,
    ) -> int:
        """How many leading blocks to load, of those in these tiers, with so many bytes in all and
        tokens each, from token `start` on."""
        if not tiers:
            return 0
        copy = self._copies.line
        lines = {
            tier: CostLine(copy.fixed_s + load.fixed_s, copy.each_s + load.each_s)
            for tier in dict.fromkeys(tiers)
            for load in (loads.get(tier, CostLine()),)
        }
        each = nbytes / len(tiers)
        return self.economy.worth_leading(
            tiers, lines, block_bytes=each, block_tokens=num_tokens, start=start
        )

    def slower(self) -> None:
        """A prompt's blocks are computed because that is faster."""
        self._num_slower += 1

    def tries(self) -> bool:
        """Whether slower tiers were not measured for so long that it is time to try them. Copies
        are measured by use only, so what they cost is then forgotten."""
        if self._num_slower < RETRY_EVERY:
            return False
        self._num_slower, self._copies = 0, Cost()
        return True

    def copied(self, nbytes: int, seconds: float) -> None:
        """Blocks in the node's memory were loaded."""
        self._copies.observe(nbytes, seconds)

    def begun(self, scheduled: Iterable[tuple[int, int]], *, loads: bool) -> None:
        """vLLM begins a step with these tokens of each request: the first one's place, and how
        many. `loads`: it waits for blocks."""
        parts = [(start, num) for start, num in scheduled if num > 1]  # one: of an answer
        counts = sum(num for _, num in parts) >= FEWEST_TOKENS and not loads
        self._steps.append((self.clock_s(), parts if counts else ()))

    def ended(self) -> None:
        """The oldest step is done."""
        if self._steps:
            begun_s, parts = self._steps.popleft()
            now_s = self.clock_s()
            self.economy.compute.observe(parts, now_s - max(begun_s, self._ended_s))
            self._ended_s = now_s
