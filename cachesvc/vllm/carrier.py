"""The workers' side of the connector: copies blocks between vLLM's KV tensors and the node's
memory.

One thread loads and one stores, each with its own link, so that neither delays a step or the other.
In the node's frame a block is a run of slabs, one per layer, in the layers' order.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import torch

from cachesvc.vllm.identity import EngineIdentity, UnsupportedKv
from cachesvc.vllm.link import NodeLink
from cachesvc.vllm.locked import LockedMemory
from cachesvc.vllm.planner import Transfer
from cachesvc.vllm.slabs import BlockCopier, copier_of, slabs_of
from tiers.node.arena import SharedMemory, frame_stride
from tiers.node.client import NodeClient

logger = logging.getLogger(__name__)

TIMEOUT_S = 30.0  # of a load from the disk, or of a store


@dataclass(slots=True)
class _Job:
    transfer: Transfer
    ready: "torch.cuda.Event | None"  # completes when the device is done with these blocks


@dataclass(slots=True)
class _Done:
    """What the threads have finished since vLLM last asked. Guarded by the lock."""

    loaded: set[str] = field(default_factory=set)
    saved: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)


class Carrier:
    """Moves one rank's blocks. Call `start` after vLLM has created its KV tensors."""

    def __init__(self, identity: EngineIdentity, node: Path, rank: int) -> None:
        self._identity = identity
        self._rank = rank
        self._node = node
        self._locked: LockedMemory | None = None
        self._links = [NodeLink(node, identity.layout, timeout_s=TIMEOUT_S) for _ in range(2)]
        self._queues: list[SimpleQueue[_Job | None]] = [SimpleQueue(), SimpleQueue()]
        self._threads: list[threading.Thread] = []
        self._device = torch.device("cpu")
        self._copiers: list[BlockCopier] = []
        self._lock = threading.Lock()
        self._done = _Done()

    def start(self, kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> None:
        """Starts to serve these tensors. Raises UnsupportedKv for blocks of another shape."""
        slabs = [slab for name in kv_caches for slab in slabs_of(kv_caches[name], num_blocks)]
        block_bytes = sum(slab.shape[1] for slab in slabs)
        if block_bytes != self._identity.block_bytes:
            raise UnsupportedKv(
                f"a block has {block_bytes} bytes in vLLM's tensors and "
                f"{self._identity.block_bytes} by its configuration"
            )
        self._device = slabs[0].device
        stride = frame_stride(self._identity.layout)
        self._copiers = [copier_of(slabs, stride) for _ in range(2)]
        if self._device.type == "cuda":
            self._locked = LockedMemory(self._node, self._identity.layout, self._device)
        for name, work, queue in (
            ("load", self._load, self._queues[0]),
            ("save", self._save, self._queues[1]),
        ):
            thread = threading.Thread(
                target=self._serve, args=(work, queue), name=f"cachesvc-{name}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def move(self, loads: Sequence[Transfer], saves: Sequence[Transfer]) -> None:
        """Starts these transfers, after the device work submitted before this call."""
        ready = _mark() if (loads or saves) and self._device.type == "cuda" else None
        for queue, transfers in zip(self._queues, (loads, saves), strict=True):
            for transfer in transfers:
                queue.put(_Job(transfer, ready))

    def take_done(self) -> tuple[set[str], set[str]]:
        """Requests whose (loads, saves) have ended since the last call, with or without success."""
        with self._lock:
            done = (self._done.loaded, self._done.saved)
            self._done.loaded, self._done.saved = set(), set()
        return done

    def take_failed_blocks(self) -> set[int]:
        """vLLM's numbers of blocks that could not be loaded and must be computed."""
        with self._lock:
            failed, self._done.failed_blocks = self._done.failed_blocks, set()
        return failed

    def close(self) -> None:
        """Finishes started transfers and leaves the node."""
        for queue in self._queues:
            queue.put(None)
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        for link in self._links:
            link.close()
        if self._locked is not None:
            self._locked.close()

    def _serve(self, work: Callable[[Transfer], None], queue: "SimpleQueue[_Job | None]") -> None:
        if self._device.type == "cuda":  # copies use a stream beside the model's
            torch.cuda.set_stream(torch.cuda.Stream(self._device))
        while (job := queue.get()) is not None:
            if job.ready is not None:
                job.ready.synchronize()
            try:
                work(job.transfer)
            except Exception:  # the top of this thread: a fault is a miss, and is logged
                logger.exception(f"cachesvc: moving blocks of {job.transfer.request_id} failed")
                is_load = work == self._load
                self._links[0 if is_load else 1].close()  # makes the node take its leases back
                self._end(job.transfer, 0, is_load=is_load)

    def _load(self, transfer: Transfer) -> None:
        def use(node: NodeClient) -> int:
            frames = node.lease(transfer.ids[self._rank])
            assert node.memory is not None
            blocks = transfer.blocks[: len(frames)]
            with self._rows(node.memory, frames) as rows:
                self._copiers[0].load(rows, frames, blocks, _piece(node.memory))
            node.release(frames)
            return len(frames)

        self._end(transfer, self._links[0].attempt(use) or 0, is_load=True)

    def _save(self, transfer: Transfer) -> None:
        def use(node: NodeClient) -> None:
            pairs = node.reserve(transfer.ids[self._rank])
            assert node.memory is not None
            frames = [frame for _, frame in pairs]
            blocks = [transfer.blocks[position] for position, _ in pairs]
            with self._rows(node.memory, frames) as rows:
                self._copiers[1].save(rows, frames, blocks, _piece(node.memory))
            node.commit(frames)

        self._links[1].attempt(use)
        self._end(transfer, len(transfer.blocks), is_load=False)

    def _rows(
        self, memory: SharedMemory, frames: Sequence[int]
    ) -> AbstractContextManager[torch.Tensor]:
        """The rows for copies of these frames of the node's memory: locked for a GPU."""
        return self._locked.rows(memory, frames) if self._locked else nullcontext(memory.rows)

    def _end(self, transfer: Transfer, num_moved: int, *, is_load: bool) -> None:
        with self._lock:
            if is_load:
                self._done.failed_blocks |= set(transfer.blocks[num_moved:])
                self._done.loaded.add(transfer.request_id)
            else:
                self._done.saved.add(transfer.request_id)


def _piece(memory: SharedMemory) -> int:
    """Frames that one registration may have; all, where the node offers none."""
    return memory.piece_frames or memory.num_frames


def _mark() -> "torch.cuda.Event":
    event = torch.cuda.Event()
    event.record()
    return event
