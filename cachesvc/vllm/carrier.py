"""The workers' side of the connector: copies blocks between vLLM's KV tensors and the node's
memory.

One thread loads and one stores, each with its own links, so that neither delays a step or the
other. In the node's frame a block is a run of slabs, one or more for each layer of its group, in
the layers' order.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

import torch

from cachesvc.model_files import UnsupportedKv
from cachesvc.vllm.groups import KvGroup
from cachesvc.vllm.identity import EngineIdentity
from cachesvc.vllm.link import RETRY_S, NodeLink
from cachesvc.vllm.locked import LockedMemory
from cachesvc.vllm.slabs import BlockCopier, copier_of, slabs_of
from cachesvc.vllm.transfers import GroupBlocks, Transfer, Transferred
from tiers.blocks.layout import BlockLayout
from tiers.node.arena import SharedMemory, frame_stride
from tiers.node.client import NodeClient

logger = logging.getLogger(__name__)

KvTensors = torch.Tensor | Sequence[torch.Tensor]  # of a layer; several for a state
LOAD_S = 30.0  # for a load, which may be from the disk
STEP_LOAD_S = 1.0  # for each answer of a load that a step waits for
PART_BYTES = 16 << 20  # that are copied while the node loads more
STORE_S = 5.0  # for each answer of a store; the node has it in memory, and vLLM's blocks wait


@dataclass(slots=True)
class _Job:
    transfer: Transfer
    ready: "torch.cuda.Event | None"  # completes when the device is done with these blocks


class Carrier:
    """Moves one rank's blocks. Call `start` after vLLM has created its KV tensors."""

    def __init__(self, identity: EngineIdentity, node: Path, rank: int) -> None:
        self._identity = identity
        self._rank = rank
        self._node = node
        self._locked: dict[BlockLayout, LockedMemory] = {}
        layouts = dict.fromkeys(group.layout for group in identity.groups)
        self._links = [
            {layout: NodeLink(node, layout, timeout_s=timeout_s) for layout in layouts}
            for timeout_s in (LOAD_S, STORE_S)
        ]
        self._queues: list[SimpleQueue[_Job | None]] = [SimpleQueue(), SimpleQueue()]
        self._threads: list[threading.Thread] = []
        self._device = torch.device("cpu")
        self._copiers: list[list[BlockCopier]] = [[], []]  # by thread and group
        self._ended = threading.Condition()
        self._num_moving = 0  # transfers begun and not ended; guarded by the condition
        self._num_in_step = 0  # of these, loads that a step waits for
        self._moved = Transferred()  # since vLLM last asked; guarded by the condition

    def start(self, kv_caches: Mapping[str, KvTensors], num_blocks: int) -> None:
        """Starts to serve these tensors, by layer. Raises UnsupportedKv for blocks of another
        shape."""
        for group in self._identity.groups:
            slabs = _slabs(group, kv_caches, num_blocks)
            self._device = slabs[0].device
            for copiers in self._copiers:
                copiers.append(copier_of(slabs, frame_stride(group.layout)))
        if self._device.type == "cuda":
            for layout in self._links[0]:
                self._locked[layout] = LockedMemory(self._node, layout, self._device)
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
        """Starts these transfers, after the device work submitted before this call. Returns when
        loads in this step have ended."""
        ready = None
        if (loads or saves) and self._device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        with self._ended:
            self._num_moving += len(loads) + len(saves)
            self._num_in_step += sum(load.in_step for load in loads)
        for queue, transfers in zip(self._queues, (loads, saves), strict=True):
            for transfer in transfers:
                queue.put(_Job(transfer, ready))
        with self._ended:
            self._ended.wait_for(lambda: not self._num_in_step)

    def wait(self, timeout_s: float) -> None:
        """Returns when any transfer has ended that vLLM was not told of, when none is under way, or
        after `timeout_s`."""
        with self._ended:
            self._ended.wait_for(
                lambda: not self._num_moving or self._moved.loaded or self._moved.saved, timeout_s
            )

    def take_loaded(self) -> Transferred:
        """The loads that have ended since the last call."""
        with self._ended:
            moved, self._moved = self._moved, Transferred(saved=self._moved.saved)
            moved.saved = []
            return moved

    def take_saved(self) -> list[str]:
        """The saves that have ended since the last call, with or without success."""
        with self._ended:
            saved, self._moved.saved = self._moved.saved, []
        return saved

    def close(self) -> None:
        """Finishes started transfers and leaves the node."""
        for queue in self._queues:
            queue.put(None)
        for thread in self._threads:
            thread.join(LOAD_S)
        for link in [link for links in self._links for link in links.values()]:
            link.close()
        for locked in self._locked.values():
            locked.close()

    def _serve(self, work: Callable[[Transfer], None], queue: "SimpleQueue[_Job | None]") -> None:
        if self._device.type == "cuda":  # copies use a stream beside the model's
            torch.cuda.set_stream(torch.cuda.Stream(self._device))
        while (job := self._next(queue)) is not None:
            if job.ready is not None:
                job.ready.synchronize()
            try:
                work(job.transfer)
            except Exception:  # the top of this thread: a fault is a miss, and is logged
                logger.exception(f"cachesvc: moving blocks of {job.transfer.name} failed")
                is_load = work == self._load
                for link in self._links[0 if is_load else 1].values():
                    link.close()  # makes the node take its leases back
                if is_load:
                    self._loaded(job.transfer, [0] * len(job.transfer.pieces))
                else:
                    self._saved(job.transfer)

    def _next(self, queue: "SimpleQueue[_Job | None]") -> _Job | None:
        """The next job. The thread is joined to the node all the time, also after its restart. So
        it has opened its disk, and touched spare frames, before a request wants them."""
        while True:
            for link in self._links[self._queues.index(queue)].values():
                link.join()
            with suppress(Empty):
                return queue.get(timeout=RETRY_S)

    def _load(self, transfer: Transfer) -> None:
        begun_s = time.monotonic()
        counts = [self._load_piece(piece, transfer) for piece in transfer.pieces]
        self._loaded(transfer, counts, time.monotonic() - begun_s)

    def _load_piece(self, piece: GroupBlocks, transfer: Transfer) -> int:
        """The number of leading blocks that were loaded."""
        layout, count = self._identity.groups[piece.group].layout, len(piece.blocks)
        size = max(1, PART_BYTES // layout.nbytes) if transfer.in_parts else count

        def use(node: NodeClient) -> int:
            done = 0
            while done < count:
                num_loaded = self._load_run(piece, done, min(done + size, count), node)
                done += num_loaded
                if num_loaded < size:
                    break
            return done

        timeout_s = STEP_LOAD_S if transfer.in_step else None
        return self._links[0][layout].attempt(use, timeout_s=timeout_s) or 0

    def _load_run(self, piece: GroupBlocks, begin: int, end: int, node: NodeClient) -> int:
        """Loads blocks [begin, end) of a piece. Returns the number of leading ones loaded."""
        frames = node.lease(piece.part(self._rank)[begin:end])
        assert node.memory is not None
        blocks = piece.blocks[begin : begin + len(frames)]
        with self._rows(node.memory, frames) as rows:
            self._copiers[0][piece.group].load(rows, frames, blocks, _piece(node.memory))
        node.release(frames)
        return len(frames)

    def _save(self, transfer: Transfer) -> None:
        for piece in transfer.pieces:
            link = self._links[1][self._identity.groups[piece.group].layout]
            for begin, end in piece.runs(self._rank):
                link.attempt(partial(self._save_run, piece, begin, end))
        self._saved(transfer)

    def _save_run(self, piece: GroupBlocks, begin: int, end: int, node: NodeClient) -> None:
        pairs = node.reserve(piece.part(self._rank)[begin:end])
        assert node.memory is not None
        frames = [frame for _, frame in pairs]
        blocks = [piece.blocks[begin + position] for position, _ in pairs]
        with self._rows(node.memory, frames) as rows:
            self._copiers[1][piece.group].save(rows, frames, blocks, _piece(node.memory))
        node.commit(frames)

    def _rows(
        self, memory: SharedMemory, frames: Sequence[int]
    ) -> AbstractContextManager[torch.Tensor]:
        """The rows for copies of these frames of the node's memory: locked for a GPU."""
        locked = self._locked.get(memory.layout)
        return locked.rows(memory, frames) if locked else nullcontext(memory.rows)

    def _loaded(
        self, transfer: Transfer, num_loaded: Sequence[int], load_s: float | None = None
    ) -> None:
        """A load has ended, with so many leading blocks of each piece. `load_s` None: a fault ended
        it."""
        with self._ended:
            if load_s is not None:
                self._moved.load_s[transfer.name] = load_s
            if transfer.in_step:
                self._num_in_step -= 1
            else:
                self._moved.loaded.add(transfer.name)
            for piece, count in zip(transfer.pieces, num_loaded, strict=True):
                if count == len(piece.blocks):
                    continue
                if self._identity.is_plain:
                    self._moved.failed_blocks |= set(piece.blocks[count:])
                else:
                    self._moved.failed.add(transfer.name)
            self._one_ended()

    def _saved(self, transfer: Transfer) -> None:
        with self._ended:
            self._moved.saved.append(transfer.name)
            self._one_ended()

    def _one_ended(self) -> None:
        self._num_moving -= 1
        self._ended.notify_all()


def _slabs(
    group: KvGroup, kv_caches: Mapping[str, KvTensors], num_blocks: int
) -> list[torch.Tensor]:
    """The slabs of a group's layers. Raises UnsupportedKv if its blocks have another size."""
    caches = [kv_caches[name] for name in group.layers]
    tensors = [
        tensor
        for cache in caches
        for tensor in ((cache,) if isinstance(cache, torch.Tensor) else cache)
    ]
    slabs = [slab for tensor in tensors for slab in slabs_of(tensor, num_blocks)]
    block_bytes = sum(slab.shape[1] for slab in slabs)
    if block_bytes != group.layout.nbytes:
        raise UnsupportedKv(
            f"a block has {block_bytes} bytes in vLLM's tensors and "
            f"{group.layout.nbytes} by its configuration"
        )
    return slabs


def _piece(memory: SharedMemory) -> int:
    """Frames that one registration may have; all, where the node offers none."""
    return memory.piece_frames or memory.num_frames
