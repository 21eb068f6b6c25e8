"""What moved between tiers, and how long each copy took. Fed on the engine thread alone."""

from collections.abc import Mapping
from dataclasses import dataclass

from tiers.histogram import Histogram, Spread
from tiers.tier import TierName

Lane = tuple[TierName, TierName]  # (from, to)

LANES: tuple[Lane, ...] = (
    (TierName.DEVICE, TierName.HOST),
    (TierName.HOST, TierName.DEVICE),
    (TierName.HOST, TierName.DISK),
    (TierName.DISK, TierName.HOST),
)
# From one block by PCIe or memcpy (a MiB at 10 GB/s is 0.1 ms) to a batch on a slow disk.
SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)


@dataclass(frozen=True, slots=True)
class TransferStats:
    """A snapshot of one lane. `nbytes` are bytes of KV; on disk they may be fewer."""

    num_blocks: int
    nbytes: int
    seconds: Spread  # of each copy or job, which carries one block or several


class TransferCounts:
    """One lane for each pair of neighbouring tiers; from a remote tier, once it has served."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._num_blocks = dict.fromkeys(LANES, 0)
        self._nbytes = dict.fromkeys(LANES, 0)
        self._seconds = {lane: Histogram(SECONDS) for lane in LANES}

    def observe(
        self,
        source: TierName,
        target: TierName,
        num_blocks: int,
        seconds: float,
        nbytes: int | None = None,
    ) -> None:
        """One copy or job of `num_blocks` has arrived; `nbytes` where they were not moved whole."""
        lane = source, target
        moved = num_blocks * self._block_bytes if nbytes is None else nbytes
        self._nbytes[lane] = self._nbytes.get(lane, 0) + moved
        self._num_blocks[lane] = self._num_blocks.get(lane, 0) + num_blocks
        self._seconds.setdefault(lane, Histogram(SECONDS)).observe(seconds)

    def stats(self) -> Mapping[Lane, TransferStats]:
        return {
            lane: TransferStats(num_blocks, self._nbytes[lane], self._seconds[lane].spread())
            for lane, num_blocks in self._num_blocks.items()
        }
