"""Counts of what moved between tiers, and how long each copy took. Engine thread only."""

from collections import Counter
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
# From one block over PCIe or by memcpy (a MiB at 10 GB/s takes 0.1 ms) to a batch on a slow disk.
SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)


@dataclass(frozen=True, slots=True)
class TransferStats:
    """A snapshot of one lane. `nbytes` counts bytes of KV. On disk they may take fewer."""

    num_blocks: int
    nbytes: int
    seconds: Spread  # per copy or job, which carries one block or several


class TransferCounts:
    """One lane per pair of neighbouring tiers. A remote tier's lane appears once it has served."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._moved: Counter[Lane] = Counter(dict.fromkeys(LANES, 0))  # blocks
        self._nbytes: Counter[Lane] = Counter()
        self._seconds = {lane: Histogram(SECONDS) for lane in LANES}

    def observe(
        self,
        source: TierName,
        target: TierName,
        num_blocks: int,
        seconds: float,
        nbytes: int | None = None,
    ) -> None:
        """Count a finished copy or job. `nbytes` is given if blocks did not move whole."""
        lane = source, target
        self._nbytes[lane] += num_blocks * self._block_bytes if nbytes is None else nbytes
        self._moved[lane] += num_blocks
        self._seconds.setdefault(lane, Histogram(SECONDS)).observe(seconds)

    def stats(self) -> Mapping[Lane, TransferStats]:
        return {
            lane: TransferStats(num_blocks, self._nbytes[lane], self._seconds[lane].spread())
            for lane, num_blocks in self._moved.items()
        }
