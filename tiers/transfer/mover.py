"""The threads that read and write the disk tier, so that the engine thread never has to.

The engine thread submits jobs and checks `job.done` once per step. Loads run on a few reader
threads. Stores come from one writer thread, and the disk has a thread for each shard. Both
queues are bounded: a job that does not fit is refused at once, and the caller counts it. Stores
wait while loads are under way, because a request waits for a load and nobody waits for a store.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import compress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tiers.blocks.keys import BlockId, PrefixKey
from tiers.errors import MissReason
from tiers.tier import Age, Loaded, ManagedTier, TierName
from tiers.transfer.niceness import be_nice

if TYPE_CHECKING:
    from tiers.blocks.frames import Frame  # torch

logger = logging.getLogger(__name__)

T = TypeVar("T")
FLUSH_EVERY_S = 5.0  # idle time after which the writer flushes the tier
BLOCKS_PER_LOAD = 4  # blocks in one read job, so that several readers share a prefix
NOTHING = Loaded(0, None)
STORE_YIELD_S = 0.05  # the longest that a store waits for loads to finish


@dataclass(slots=True, eq=False)
class ProbeJob:
    """Find the leading blocks of `ids` that the tier holds, and the tier of each.

    If the layout has windows, `lacking` are blocks above the tier that lack theirs. `windows` are
    then those of all these blocks whose windows can be loaded.
    """

    ids: Sequence[BlockId]
    lacking: Sequence[BlockId] | None = None
    tiers: Sequence[TierName] = ()
    windows: Collection[PrefixKey] = ()
    is_slower: bool = False  # more is held, which takes longer to load than to compute
    done: bool = False

    @property
    def held(self) -> int:
        return len(self.tiers)

    def run(self, tier: ManagedTier) -> None:
        self.tiers, self.is_slower = tier.places(self.ids)
        if self.lacking is not None:
            ids = [*self.lacking, *self.ids[: self.held]]
            there = compress(ids, tier.have_windows(ids))
            self.windows = frozenset(block.key for block in there)

    def fail(self) -> None:
        self.tiers = self.windows = ()


@dataclass(slots=True, eq=False)
class HeldJob:
    """Find which of `keys` the tier holds."""

    keys: Sequence[PrefixKey]
    held: Sequence[bool] = ()
    done: bool = False

    def run(self, tier: ManagedTier) -> None:
        self.held = tier.held(self.keys)

    def fail(self) -> None:
        self.held = ()


@dataclass(slots=True, eq=False)
class LoadJob:
    """Fill `frames` with the blocks `ids`. The frames belong to this job until it is done."""

    ids: Sequence[BlockId]
    frames: "Sequence[Frame]"
    loaded: Loaded = NOTHING
    seconds: float = 0.0
    done: bool = False

    def run(self, tier: ManagedTier) -> None:
        started = time.perf_counter()
        self.loaded = tier.load(self.ids, self.frames)
        self.seconds = time.perf_counter() - started

    def fail(self) -> None:
        self.loaded = Loaded(0, MissReason.IO_ERROR)


@dataclass(slots=True, eq=False)
class StoreJob:
    """Write the blocks `ids` from `frames`. The tier does not hold those `dropped` afterwards."""

    ids: Sequence[BlockId]
    frames: "Sequence[Frame]"
    ages: Sequence[Age] = ()
    dropped: Sequence[PrefixKey] = ()
    failed: bool = False
    seconds: float = 0.0
    done: bool = False

    def run(self, tier: ManagedTier) -> None:
        started = time.perf_counter()
        self.dropped = tier.store(self.ids, self.frames, self.ages)
        self.seconds = time.perf_counter() - started

    def fail(self) -> None:
        self.failed = True


@dataclass(slots=True, eq=False)
class WriterTask(Generic[T]):
    """Any other work on the tier by the writer thread, in order with the stores. Never refused,
    because such tasks are few. `result` also carries a failure."""

    work: Callable[[ManagedTier], T]
    result: "Future[T]" = field(default_factory=Future)
    done: bool = False

    def run(self, tier: ManagedTier) -> None:
        try:
            self.result.set_result(self.work(tier))
        except Exception as error:  # noqa: BLE001 - handed to who asked
            self.result.set_exception(error)

    def fail(self) -> None:
        raise AssertionError("a task keeps its failure to itself")


Job = ProbeJob | HeldJob | LoadJob | StoreJob | WriterTask[Any]


@dataclass(slots=True)
class _Lane:
    """A bounded queue of jobs and the threads that serve it."""

    bound: int
    queue: "SimpleQueue[Job | None]" = field(default_factory=SimpleQueue)
    pending: int = 0  # submitted but not done; changed under the mover's lock
    threads: list[threading.Thread] = field(default_factory=list)


class Mover:
    """Owns the reader threads and the writer thread of one disk tier."""

    def __init__(
        self,
        tier: ManagedTier,
        *,
        num_readers: int | None = None,
        max_loads: int = 64,
        max_stores: int = 4,
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        """`num_readers` None: as many as the tier wants."""
        self._tier = tier
        self.num_readers = tier.num_readers if num_readers is None else num_readers
        self._on_done = on_done
        self._loads = _Lane(max_loads)
        self._stores = _Lane(max_stores)
        self._lock = threading.Lock()
        self._loads_idle = threading.Event()
        self._loads_idle.set()

    @property
    def below(self) -> TierName:
        """The name of the tier directly below memory."""
        return self._tier.name

    def start(self, *, writer_niceness: int = 10) -> None:
        for number in range(self.num_readers):
            self._spawn(self._loads, f"cachesvc-disk-read-{number}", niceness=0)
        self._spawn(self._stores, "cachesvc-disk-write", niceness=writer_niceness)

    def close(self) -> None:
        """Finish every accepted job and end the threads."""
        for lane in (self._loads, self._stores):
            for _ in lane.threads:
                lane.queue.put(None)
            for thread in lane.threads:
                thread.join()
            lane.threads.clear()

    def set_on_done(self, on_done: Callable[[], None]) -> None:
        """Set what to call when a job is done. It is called on the mover's threads."""
        self._on_done = on_done

    def submit(self, job: Job) -> bool:
        """Queue a job. False if its queue is full and the job was refused."""
        lane = self._stores if isinstance(job, StoreJob | WriterTask) else self._loads
        with self._lock:
            if lane.pending >= lane.bound and not isinstance(job, WriterTask):
                return False
            lane.pending += 1
            if lane is self._loads:
                self._loads_idle.clear()
        lane.queue.put(job)
        return True

    @property
    def num_stores(self) -> int:
        return self._stores.pending

    @property
    def num_loads(self) -> int:
        return self._loads.pending

    @property
    def store_room(self) -> int:
        """How many more stores would be accepted now."""
        return self._stores.bound - self._stores.pending

    def _spawn(self, lane: _Lane, name: str, niceness: int) -> None:
        thread = threading.Thread(target=self._serve, args=(lane, niceness), name=name, daemon=True)
        lane.threads.append(thread)
        thread.start()

    def _next(self, lane: _Lane) -> Job | None:
        """The next job of a lane. The writer flushes the tier when it has waited long for one."""
        while True:
            try:
                return lane.queue.get(timeout=FLUSH_EVERY_S if lane is self._stores else None)
            except Empty:
                try:
                    self._tier.flush()
                except Exception:  # the top of this thread, as in `_serve`
                    logger.exception("the disk tier failed to flush")

    def _serve(self, lane: _Lane, niceness: int) -> None:
        if niceness:
            be_nice(niceness)
        while (job := self._next(lane)) is not None:
            if lane is self._stores:
                self._loads_idle.wait(STORE_YIELD_S)
            try:
                job.run(self._tier)
            except Exception:  # the top of this thread: a tier must not raise, so log it
                logger.exception("the disk tier failed")
                job.fail()
            with self._lock:
                lane.pending -= 1
                if lane is self._loads and lane.pending == 0:
                    self._loads_idle.set()
            job.done = True
            self._on_done()
