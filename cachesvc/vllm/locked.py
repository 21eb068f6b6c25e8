"""The node's memory, locked for a worker's GPU, so that copies run at its link's full rate.

The worker maps the memory once more for both of its threads, over a connection of its own, and
registers it with CUDA piece by piece, when a piece is first used. CUDA keeps the pages that it
found. So the node is asked before: while this connection lasts it gives no page of the piece back.
The memory is unregistered before the connection ends. A dead worker's pages end with it, and a dead
node's memory is another file than its successor's.
"""

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cachesvc.vllm.link import NodeLink
from tiers.blocks.frames import clear_error, pci_address
from tiers.blocks.layout import BlockLayout
from tiers.blocks.numa import cpus_beside, running_on
from tiers.node.arena import SharedMemory
from tiers.node.client import NodeClient

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0  # of the node's answer


class LockedMemory:
    """Both threads of a worker use it. Invariant: a registered piece is one that the node keeps."""

    def __init__(self, node: Path, layout: BlockLayout, device: torch.device) -> None:
        self._link = NodeLink(node, layout, timeout_s=TIMEOUT_S)
        self._device = device
        self._cpus = cpus_beside(pci_address(device))
        self._cudart: Any = torch.cuda.cudart()
        self._changed = threading.Condition()
        self._num_users = 0  # copies under way
        self._pieces: dict[int, int] = {}  # address of each that was asked for; 0: not locked
        self._is_leaving = False  # a connection ends as soon as its memory is unlocked
        self._is_refused = False  # by the system, which would refuse the next one too

    @contextmanager
    def rows(self, memory: SharedMemory, frames: Sequence[int]) -> Iterator[torch.Tensor]:
        """Rows for copies of these frames of `memory`, as a thread's own connection knows it.

        They are locked as far as possible, and right in any case. They stay until the copies end.
        """
        with self._changed:
            used = self._joined(memory)
            if used is not None:
                self._lock(used, frames)
                used = used if used is self._link.memory else None
            self._num_users += used is not None
        try:
            yield (used or memory).rows
        finally:
            with self._changed:
                self._num_users -= used is not None
                self._changed.notify_all()

    def close(self) -> None:
        """Unlock everything and leave the node."""
        with self._changed:
            self._link.close()

    def _joined(self, memory: SharedMemory) -> SharedMemory | None:
        """The mapping for both threads, if it is of the same file."""
        if not memory.piece_frames or self._is_leaving:
            return None
        if self._link.memory is None or not _is_same(self._link.memory, memory):
            self._link.close()  # it was that of an earlier node
            self._link.attempt(self._watch)
        mine = self._link.memory
        return mine if mine is not None and _is_same(mine, memory) else None

    def _watch(self, node: NodeClient) -> None:
        assert node.memory is not None
        self._pieces = {}
        node.memory.before_close = self._unlock

    def _lock(self, memory: SharedMemory, frames: Sequence[int]) -> None:
        for piece in sorted({frame // memory.piece_frames for frame in frames}):
            known = piece in self._pieces or self._is_refused
            if not known and self._link.memory is memory:
                self._link.attempt(partial(self._register, piece=piece))

    def _register(self, node: NodeClient, piece: int) -> None:
        memory = node.memory
        assert memory is not None
        if memory.before_close != self._unlock:
            self._watch(node)  # another connection than the one that was asked first
        self._pieces[piece] = 0
        if not node.lock(piece):
            return
        first = piece * memory.piece_frames
        rows = memory.rows[first : first + memory.piece_frames]
        with running_on(self._cpus):  # what no block has had yet is touched first here
            error = self._cudart.cudaHostRegister(rows.data_ptr(), rows.nbytes, 0)
        if int(error) == 0:
            self._pieces[piece] = rows.data_ptr()
            return
        clear_error(str(self._device))
        self._is_refused = True
        logger.warning(
            f"cachesvc: the node's memory cannot be locked for the GPU, CUDA said {error}; copies "
            f"of blocks are slow: raise the limit on locked memory"
        )

    def _unlock(self) -> None:
        """Before the node hears that this connection ends. Waits for copies under way."""
        self._is_leaving = True
        self._changed.wait_for(lambda: not self._num_users)
        for address in filter(None, self._pieces.values()):
            self._cudart.cudaHostUnregister(address)
        self._pieces = {}
        self._is_leaving = False


def _is_same(one: SharedMemory, other: SharedMemory) -> bool:
    return os.path.sameopenfile(one.file, other.file)
