"""Decides whether loading pays: whether a block loads faster than it is recomputed.

Pure. The engine thread passes in rates measured while running.
"""

from dataclasses import dataclass

SMOOTHING = 0.2  # weight of the latest measurement in the moving averages
RETRY_EVERY = 32  # after this many refusals in a row, one load is let through to measure again


@dataclass(slots=True)
class LoadEconomy:
    """Compares the time to load a run of blocks with the time to compute its tokens.

    Until both rates are known, every load is worth it. A slow disk is tried again every
    `RETRY_EVERY` refusals, so a passing slowness does not turn the tier off for good.
    """

    enabled: bool = True
    load_bytes_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    refused: int = 0
    _in_a_row: int = 0

    def observe_load(self, nbytes: int, seconds: float) -> None:
        if nbytes and seconds > 0:
            self.load_bytes_per_s = _smooth(self.load_bytes_per_s, nbytes / seconds)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        if num_tokens and seconds > 0:
            self.prefill_tokens_per_s = _smooth(self.prefill_tokens_per_s, num_tokens / seconds)

    def worth(self, num_tokens: int, nbytes: int, num_readers: int = 1) -> bool:
        """Whether loading by so many readers at once takes no longer than computing."""
        if not self.enabled or not self.load_bytes_per_s or not self.prefill_tokens_per_s:
            return True
        load_s = nbytes / (self.load_bytes_per_s * num_readers)
        compute_s = num_tokens / self.prefill_tokens_per_s
        if load_s <= compute_s:
            self._in_a_row = 0
            return True
        self._in_a_row += 1
        if self._in_a_row >= RETRY_EVERY:
            self._in_a_row = 0
            return True
        self.refused += 1
        return False


def _smooth(average: float, value: float) -> float:
    return value if not average else average + SMOOTHING * (value - average)
