"""A shard's place in the tier, which allows checking and replacing it under its readers.

    checking ──sound──► ready ──an error of LMDB, a file cut short or removed──► checking
        └──broken──► replaced by an empty shard, and counted

During a check, blocks are found and read without LMDB (`UncheckedShard`), and nothing is written.
Readers enter and leave. Replacing or closing the shard waits until all have left, because LMDB's
map must not be unmapped under a reader.
"""

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tiers.disk.counts import LOG_EVERY_S
from tiers.disk.recovery.check import CHECK_AT_ONCE_S, ShardCheck, ShardReport, roll_back
from tiers.disk.recovery.unchecked import UncheckedShard
from tiers.disk.shard import Shard, ShardBusy, ShardDamaged
from tiers.disk.storage import NO_ROOM, MapFull, Storage, StorageError, is_doubtful

logger = logging.getLogger(__name__)

_S = TypeVar("_S", bound=Shard | UncheckedShard)
FAILED_COMMITS = 2  # in a row, after which the shard counts as failing
FULL_BYTES = 1 << 20  # with less, a file system counts as full
MAX_DOUBTS = 3  # errors of a shard found sound each time, after which it is replaced anyway


@dataclass(frozen=True, slots=True)
class Opening:
    storage: Storage
    map_bytes: int  # of the existing file; may be larger than `open_shard` allows
    open_shard: Callable[[], Shard]
    on_loss: Callable[[int, str], None]  # called with the number of lost blocks and the reason
    check_s: float = CHECK_AT_ONCE_S


class ShardSlot:
    """Holds one shard: open, being checked, or none if none could be opened yet."""

    def __init__(self, path: Path, opening: Opening, num_expected: int = 0) -> None:
        self.path = path
        self._data = path / "data.mdb"
        self._opening = opening
        self._changed = threading.Condition()
        self._num_inside = 0
        self._num_blocks = num_expected
        self._num_doubts = 0
        self._num_failed = 0  # commits that failed since the last that did not
        self._failure = ""  # why the last of them did
        self.repaired = ""  # what this shard last lost to damage since the start
        self._quiet_until_s = (
            0.0  # on a disk that is nearly full, small commits pass between others
        )
        self._shard: Shard | None = None
        self._unchecked: UncheckedShard | None = None
        self._check: ShardCheck | None = None
        self._doubted = False  # set by readers, cleared by the writer
        self._note = path.with_name(f"damage-{path.name}.txt")
        with suppress(OSError):
            logger.warning(f"disk cache: since the last start, {self._note.read_text()}")
            self._note.unlink()
        if (path / "data.mdb").exists():
            self._begin_check()
        else:
            self._shard = opening.open_shard()

    @property
    def failing(self) -> str:
        """Why its commits fail; empty if they do not. A single failure may pass."""
        return self._failure if self._num_failed >= FAILED_COMMITS else ""

    def committed(self, error: Exception | None = None) -> None:
        """Notes the end of a write transaction, and the storage's error if it failed."""
        if error is None and self.failing and time.monotonic() > self._quiet_until_s:
            logger.info(f"disk cache: {self.path} takes blocks again")
            self._quiet_until_s = time.monotonic() + LOG_EVERY_S
        self._num_failed = 0 if error is None else self._num_failed + 1
        self._failure = "" if error is None else self.reason(error)

    def reason(self, error: Exception) -> str:
        return f"{error}; its file system is full" if self.is_full(error) else str(error)

    def is_full(self, error: Exception) -> bool:
        """Whether there was no room, which LMDB may call "Input/output error"."""
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            return True
        with suppress(OSError):
            return shutil.disk_usage(self.path).free < FULL_BYTES
        return False

    @contextmanager
    def use(self) -> Iterator[Shard]:
        """The shard, kept open during the block. Raises ShardDamaged if none is usable."""
        with self._inside(self._ready()) as shard:
            yield shard

    @contextmanager
    def read(self) -> Iterator[Shard | UncheckedShard]:
        """The shard to read from, also during a check. Raises ShardDamaged."""
        found = self._unchecked if self._check is not None else self._ready()
        if found is None:
            raise ShardBusy(f"{self.path} is being checked")
        with self._inside(found) as shard:
            yield shard

    def settle(self) -> bool:
        """Takes in a finished check and starts one if in doubt. Returns whether the shard is
        writable. For the writer thread. Raises OSError if the system cannot open files."""
        if self._check is not None:
            report = self._check.poll()
            if report is not None:
                self._adopt(report)
        elif self._doubted:
            self._doubt()
        elif self._shard is None:
            self._begin_check()
        return self._shard is not None

    def mend(self, error: Exception) -> bool:
        """Handles an error of the shard. Returns whether a retry makes sense."""
        if _is_doubtful(error):
            self._doubted = True
            return self.settle()
        return False

    def file_bytes(self) -> int:
        """Bytes that its file takes on the file system, whatever state the shard is in."""
        try:
            return self._data.stat().st_blocks * 512
        except OSError:
            return 0

    def clear(self, why: str) -> None:
        """Replaces the shard by an empty one, to have its room."""
        logger.error(f"disk cache: {self.path} is emptied: {why}")
        self._empty()

    def close(self) -> None:
        if self._check is not None:
            self._check.cancel()
        self._leave()

    def _ready(self) -> Shard:
        if self._shard is None or self._doubted:
            raise ShardBusy(f"{self.path} is being replaced or checked")
        return self._shard

    @contextmanager
    def _inside(self, shard: _S) -> Iterator[_S]:
        with self._changed:
            if shard is not self._shard and shard is not self._unchecked:
                raise ShardBusy(f"{self.path} is being replaced")
            self._num_inside += 1
        try:
            yield shard
        except Exception as error:
            self._doubted |= _is_doubtful(error)
            raise
        finally:
            with self._changed:
                self._num_inside -= 1
                self._changed.notify_all()

    def _doubt(self) -> None:
        """LMDB reported damaged pages: starts a check, a limited number of times."""
        self._num_doubts += 1
        if self._num_doubts > MAX_DOUBTS:
            self._replace("LMDB refuses it again and again")
            return
        self._leave()
        self._begin_check()

    def _begin_check(self) -> None:
        opening = self._opening
        self._doubted = False
        check = ShardCheck(self.path, opening.map_bytes)
        report = check.begin(opening.check_s)
        if report is not None:
            self._adopt(report)
            return
        logger.warning(f"disk cache: {self.path} is being checked; it is read and not written")
        try:
            self._unchecked = UncheckedShard(self.path, opening.map_bytes, opening.storage)
            self._num_blocks = self._unchecked.totals.num_blocks
        except OSError as error:
            logger.error(f"disk cache: {self.path} cannot be read while it is checked: {error}")
        self._check = check

    def _adopt(self, report: ShardReport) -> None:
        """Opens the shard after a check."""
        self._leave()
        if report.problem is not None:
            self._replace(report.problem)
            return
        try:
            if report.rolled_back is not None:
                self._lost(1, f"has given up its last commit: {report.rolled_back}")
                roll_back(self.path, report.slot)
            if report.fixes:
                self._fix(report)
            self._open()
        except MapFull:
            self._replace("it has no room for its repair")
        except (ShardDamaged, *StorageError) as error:
            if not _is_doubtful(error):
                raise
            self._replace(str(error))

    def _fix(self, report: ShardReport) -> None:
        shard = Shard(self.path, self._opening.map_bytes, storage=self._opening.storage)
        try:
            shard.fix(report.fixes)
            shard.sync()
        finally:
            shard.close()
        if report.fixes.keys:
            self._lost(len(report.fixes.keys), "had entries that contradict each other")

    def _replace(self, why: str) -> None:
        """Replaces the shard by an empty one."""
        self._lost(max(1, self._num_blocks), f"was replaced by an empty shard: {why}")
        self._empty()

    def _empty(self) -> None:
        self._leave()
        self._num_blocks = self._num_doubts = 0
        shutil.rmtree(self.path, ignore_errors=True)
        self._open()

    def _lost(self, num_blocks: int, what: str) -> None:
        """Tells readiness, the metrics, the log and the next start what became of the shard."""
        self.repaired = f"{self.path} {what}"
        logger.error(f"disk cache: {self.repaired}")
        self._opening.on_loss(num_blocks, self.repaired)
        with suppress(OSError):
            self._note.write_text(f"{self.repaired} ({num_blocks} blocks, {time.ctime()})")

    def _open(self) -> None:
        shard = self._opening.open_shard()
        with self._changed:
            self._shard = shard
            self._num_blocks = shard.totals.num_blocks
            self._doubted = False

    def _leave(self) -> None:
        with self._changed:
            shard, self._shard = self._shard, None
            unchecked, self._unchecked = self._unchecked, None
            self._check = None
            self._changed.wait_for(lambda: self._num_inside == 0)
        if shard is not None:
            shard.close()
        if unchecked is not None:
            unchecked.close()


def _is_doubtful(error: BaseException) -> bool:
    """Whether the file must be checked after this error."""
    return (isinstance(error, ShardDamaged) and not isinstance(error, ShardBusy)) or is_doubtful(
        error
    )
