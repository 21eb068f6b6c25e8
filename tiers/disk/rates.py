"""How fast a disk reads, its records expand and tokens are computed: whether compression pays.

    a byte of KV from disk, s   compressed     the longer of (1 - saved) / disk and expand / readers
                                uncompressed   1 / disk
    a byte computed, s          compute

`disk` is the rate at which the disk answers while it is asked, `saved` the share of a block that
compression saves, `expand` the seconds in which one reader expands a byte. A disk of uncompressed
blocks holds fewer of them: the share `saved` of its hits at most, as hits grow no faster than
room. They would be computed. So records stay uncompressed where

    compressed - uncompressed > saved * (compute - uncompressed)

Until enough was read to know all of them, records are compressed. A change must pay by a
fifth of the time of a compressed read, because rates vary from one count to the next.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

logger = logging.getLogger(__name__)

MEASURED_BYTES = 64 << 20  # after which a rate is known, and counted anew
SMOOTHING = 0.5  # weight of the latest count
MARGIN = 1 / 5  # of the time of a compressed read, by which a change must pay


class DiskRates(NamedTuple):
    """What was measured. Times are in seconds for a byte of KV, or of the disk."""

    read_s: float = 0.0
    expand_s: float = 0.0
    saved: float = 0.0  # share of a block, 0 to 1
    compute_s: float = 0.0

    def favour_raw(self, num_readers: int, *, raw_now: bool = False) -> bool:
        """Whether blocks should be written uncompressed."""
        if not all(self):
            return False
        compressed_s = max((1 - self.saved) * self.read_s, self.expand_s / num_readers)
        gained_s = compressed_s - self.read_s
        margin_s = (-MARGIN if raw_now else MARGIN) * compressed_s
        return gained_s > max(0.0, self.saved * (self.compute_s - self.read_s)) + margin_s


class RateMeter:
    """Measures the rates of one disk. Any thread; methods return at once."""

    def __init__(self, num_readers: int) -> None:
        self.compute_s = 0.0  # for a byte of KV, now; 0: unknown
        self.num_readers = num_readers
        self._lock = threading.Lock()
        self._rates = DiskRates()
        self._stored_raw = False
        self._num_reading = 0
        self._asked_since_s = 0.0
        self._read_bytes, self._read_s = 0, 0.0
        self._kv_bytes, self._saved_bytes, self._expand_s = 0, 0, 0.0

    @contextmanager
    def reading(self, nbytes: int) -> Iterator[None]:
        """While this many bytes are read. Reads at the same time share their seconds."""
        with self._lock:
            if not self._num_reading:
                self._asked_since_s = time.perf_counter()
            self._num_reading += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_reading -= 1
                now_s = time.perf_counter()
                self._read_bytes += nbytes
                self._read_s += now_s - self._asked_since_s
                self._asked_since_s = now_s
                if self._read_bytes >= MEASURED_BYTES:
                    read_s = _smooth(self._rates.read_s, self._read_s / self._read_bytes)
                    self._rates = self._rates._replace(read_s=read_s)
                    self._read_bytes, self._read_s = 0, 0.0

    def expanded(self, nbytes: int, saved_bytes: int, seconds: float) -> None:
        """A reader expanded a record to this many bytes of KV."""
        with self._lock:
            self._kv_bytes += nbytes
            self._saved_bytes += saved_bytes
            self._expand_s += seconds
            if self._kv_bytes >= MEASURED_BYTES:
                expand_s = _smooth(self._rates.expand_s, self._expand_s / self._kv_bytes)
                saved = self._saved_bytes / self._kv_bytes
                self._rates = self._rates._replace(expand_s=expand_s, saved=saved)
                self._kv_bytes, self._saved_bytes, self._expand_s = 0, 0, 0.0

    def stores_raw(self) -> bool:
        """Whether blocks should be written uncompressed now. A change is logged."""
        with self._lock:
            rates = self._rates._replace(compute_s=self.compute_s)
            raw = rates.favour_raw(self.num_readers, raw_now=self._stored_raw)
            changed, self._stored_raw = raw is not self._stored_raw, raw
        if changed:
            logger.info(
                f"disk cache: new blocks are stored {'un' if raw else ''}compressed; a GB of KV is "
                f"read in {rates.read_s * 1e9:.2f} s, expanded in {rates.expand_s * 1e9:.2f} s by "
                f"one of {self.num_readers} readers and computed in {rates.compute_s * 1e9:.2f} s;"
                f" compression saves {rates.saved:.0%}"
            )
        return raw


def _smooth(average: float, value: float) -> float:
    return value if not average else average + SMOOTHING * (value - average)
