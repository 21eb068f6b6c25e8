"""Runs images through the vision tower, on a thread beside the engine's.

The engine thread requests the images that a sequence still needs, and runs other sequences until
they are done. An image that several sequences want is computed once. The thread ends when nothing
is left to do, because a second team of arithmetic threads slows the engine's even while it waits
(docs/measurements, "Threads").
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from engine.request import Picture, tile_of
from tiers.blocks.contents import Content

if TYPE_CHECKING:
    from engine.vision.tower import VisionTower

logger = logging.getLogger(__name__)

MAX_HELD = 64  # images computed or waiting at once; one share may have half of them
IMAGE_FAILED = "an image could not be computed; see the server's log"


class _EncodedPicture:
    """One image: its owners, and its rows once computed."""

    __slots__ = ("owners", "picture", "rows", "share")

    def __init__(self, picture: Picture, share: str) -> None:
        self.picture = picture
        self.share = share
        self.owners: set[int] = set()
        self.rows: torch.Tensor | None = None


class PictureEncoder:
    """The images that sequences wait for or read. Everything except `_work` runs on the engine
    thread. The lock is held for a few instructions."""

    def __init__(self, tower: "VisionTower", on_ready: Callable[[], None] = lambda: None) -> None:
        self.on_ready = on_ready
        self.num_computed = 0  # tiles
        self._tower = tower
        self._lock = threading.Lock()
        self._entries: dict[bytes, _EncodedPicture] = {}
        self._queues: OrderedDict[str, list[_EncodedPicture]] = OrderedDict()  # by share, in turns
        self._served: str | None = None  # the share that had the last turn
        self._failed: list[int] = []
        self._thread: threading.Thread | None = None

    def want(self, owner: int, share: str, pictures: Sequence[Picture]) -> bool:
        """Whether all these images are computed. Queues the missing ones.

        Call it again later, since the number queued at once is bounded, in all and for one share.
        """
        with self._lock:
            wanted = {picture.digest: picture for picture in pictures}
            new = [each for each in wanted.values() if each.digest not in self._entries]
            if new and not self._has_room(share, len(new)):
                return False
            for picture in new:
                entry = self._entries[picture.digest] = _EncodedPicture(picture, share)
                self._queues.setdefault(share, []).append(entry)
            entries = [self._entries[digest] for digest in wanted]
            for entry in entries:
                entry.owners.add(owner)
            if self._queues and self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="cachesvc-vision", daemon=True
                )
                self._thread.start()
            return all(entry.rows is not None for entry in entries)

    def rows(self, content: Content) -> torch.Tensor:
        """The rows [length, hidden] of one tile of a computed image."""
        digest, tile = tile_of(content)
        rows = self._entries[digest].rows
        assert rows is not None, "the image is not computed"
        return rows[tile * content.length : (tile + 1) * content.length]

    def drop(self, owner: int) -> None:
        """Release the sequence's images."""
        if not self._entries:
            return
        with self._lock:
            for digest, entry in [*self._entries.items()]:
                entry.owners.discard(owner)
                if not entry.owners:
                    del self._entries[digest]

    def take_failed(self) -> list[int]:
        """The owners of images that could not be computed. Each is returned once."""
        if not self._failed:
            return []
        with self._lock:
            failed, self._failed = self._failed, []
        return failed

    def close(self) -> None:
        """Compute nothing more. Waits for the tile being computed."""
        with self._lock:
            self._queues.clear()
            for entry in self._entries.values():
                entry.owners.clear()
            self._entries.clear()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _has_room(self, share: str, num_new: int) -> bool:
        held = [entry for entry in self._entries.values() if entry.share == share]
        own = len(held) + num_new <= MAX_HELD // 2
        return not held or (own and len(self._entries) + num_new <= MAX_HELD)

    # The encoder's thread.

    def _run(self) -> None:
        while (entry := self._next()) is not None:
            try:
                rows = self._work(entry)
            except Exception:
                logger.exception("an image cannot be computed")
                self._fail(entry)
            else:
                entry.rows = rows
            self.on_ready()

    def _next(self) -> _EncodedPicture | None:
        """The next image of the share whose turn it is. None ends the thread."""
        with self._lock:
            if self._served is not None and self._served in self._queues:
                self._queues.move_to_end(self._served)
            while self._queues:
                share, entries = next(iter(self._queues.items()))
                entry = entries.pop(0)
                if not entries:
                    del self._queues[share]
                if entry.owners:
                    self._served = share
                    return entry
            self._thread = None
            return None

    def _work(self, entry: _EncodedPicture) -> torch.Tensor | None:
        """The rows of all tiles. None if nobody wants them any more."""
        rows = []
        for tile in self._tower.reader.tiles(entry.picture):
            if not entry.owners:
                return None
            rows.append(self._tower.rows(tile))
            self.num_computed += 1
        return torch.cat(rows)

    def _fail(self, entry: _EncodedPicture) -> None:
        with self._lock:
            self._failed += entry.owners
            if self._entries.get(entry.picture.digest) is entry:
                del self._entries[entry.picture.digest]
