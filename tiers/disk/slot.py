"""A shard's place in the tier, so that a damaged shard can be replaced under its readers.

Readers enter and leave; whoever replaces or closes the shard waits until all have left. LMDB's map
must not be unmapped while anyone is inside.
"""

import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tiers.disk.shard import Shard, ShardDamaged
from tiers.disk.storage import StorageError

logger = logging.getLogger(__name__)


class ShardSlot:
    """Holds one open shard, or none after damage until `replace` brought a new one."""

    def __init__(self, path: Path, open_shard: Callable[[], Shard]) -> None:
        self.path = path
        self._open = open_shard
        self._changed = threading.Condition()
        self._num_inside = 0
        self._shard: Shard | None = open_shard()
        self._damaged = False

    @property
    def damaged(self) -> bool:
        return self._damaged

    @contextmanager
    def use(self) -> Iterator[Shard]:
        """The shard, kept open meanwhile. Raises ShardDamaged where there is none to use."""
        with self._changed:
            if self._shard is None or self._damaged:
                raise ShardDamaged(f"{self.path} is being replaced")
            shard = self._shard
            self._num_inside += 1
        try:
            yield shard
        except ShardDamaged:
            self._damaged = True
            raise
        finally:
            with self._changed:
                self._num_inside -= 1
                self._changed.notify_all()

    def condemn(self) -> None:
        """Let nobody in until `replace`."""
        self._damaged = True

    def replace(self, *, keep_files: bool) -> bool:
        """Close the shard and open it again, empty unless `keep_files`. False: it did not open."""
        self._leave()
        try:
            if not keep_files:
                shutil.rmtree(self.path, ignore_errors=True)
            self._shard = self._open()
        except (*StorageError, ShardDamaged) as error:
            logger.error(f"disk cache: {self.path} cannot be opened: {error}")
            return False
        self._damaged = False
        return True

    def close(self) -> None:
        self._leave()

    def _leave(self) -> None:
        with self._changed:
            self._damaged = True
            self._changed.wait_for(lambda: self._num_inside == 0)
            shard, self._shard = self._shard, None
        if shard is not None:
            shard.close()
