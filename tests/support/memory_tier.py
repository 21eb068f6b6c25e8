"""A tier in memory and a mover without threads, for simulations. Faults and delays come from a
seed."""

import random
import threading
from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile

from tiers.blocks.frames import Frame
from tiers.blocks.keys import BlockId, PrefixKey
from tiers.blocks.part import Part
from tiers.disk.guard import DiskGuard
from tiers.errors import MissReason, TierClosed
from tiers.policy.quota import Quotas, QuotaShares
from tiers.tier import Age, Loaded, ManagedTier, Removed, TierName, TierStats
from tiers.transfer.mover import Job, LoadJob, Mover, StoreJob, WriterTask


class MemoryTier(ManagedTier):
    """A `Tier` of at most `capacity_blocks` blocks. First in, first out, as far as its guard
    allows. Any thread.

    `fault_rate` is the probability that a load or a store of a block fails.
    """

    name = TierName.DISK

    def __init__(
        self,
        capacity_blocks: int,
        *,
        block_bytes: int = 0,
        lasting_bytes: int = 0,
        fault_rate: float = 0.0,
        seed: int = 0,
        shares: QuotaShares | None = None,
        window_loss: float = 0.0,
    ) -> None:
        """`block_bytes` is for the stats and the quotas. A frame that wants only the lasting part
        gets its first `lasting_bytes`. With the probability `window_loss`, a store also drops the
        windows of some block."""
        self._lasting_bytes = lasting_bytes
        self._window_loss = window_loss
        self._without_windows: set[PrefixKey] = set()
        self._capacity = capacity_blocks
        self._block_bytes = block_bytes
        self._guard = DiskGuard(Quotas(shares, capacity_blocks * block_bytes) if shares else None)
        self.fault_rate = fault_rate
        self._random = random.Random(seed)
        self._blocks: OrderedDict[PrefixKey, tuple[BlockId, bytes]] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._faults: Counter[MissReason] = Counter()
        self._lock = threading.Lock()
        self._closed = False

    def probe(self, ids: Sequence[BlockId]) -> int:
        with self._opened():
            held = (self._blocks.get(block.key) for block in ids)
            pairs = zip(ids, held, strict=True)
            return sum(1 for _ in takewhile(lambda pair: pair[1] and pair[1][0] == pair[0], pairs))

    def load(self, ids: Sequence[BlockId], into: Sequence[Frame]) -> Loaded:
        with self._opened():
            num_loaded, reason = 0, None
            for block, frame in zip(ids, into, strict=False):
                reason = self._why_not(block)
                if frame.part is not Part.LASTING and block.key in self._without_windows:
                    reason = reason or MissReason.ABSENT
                lasting = slice(self._lasting_bytes)
                noise = b"\xee" * len(frame.buffer)  # anyone who reads it will notice
                data = noise if reason is not None else self._blocks[block.key][1]
                data = data[: len(frame.buffer)]
                if frame.part is Part.WINDOW:
                    frame.buffer[lasting.stop :] = data[lasting.stop :]
                else:
                    frame.buffer[:] = data
                if frame.part is Part.LASTING:
                    frame.buffer[lasting.stop :] = noise[lasting.stop :]
                if reason is not None:
                    break
                num_loaded += 1
            self._counts["hits"] += num_loaded
            self._counts["misses"] += min(len(ids), len(into)) - num_loaded
            return Loaded(num_loaded, reason)

    def _why_not(self, block: BlockId) -> MissReason | None:
        """Why a block cannot be served. Any reason other than absence counts as a fault."""
        held = self._blocks.get(block.key)
        if held is None:
            return MissReason.ABSENT
        reason = None
        if held[0] != block:
            reason = MissReason.COLLISION
        elif self._random.random() < self.fault_rate:
            reason = MissReason.CHECKSUM
        if reason is not None:
            self._faults[reason] += 1
        return reason

    def store(
        self, ids: Sequence[BlockId], frames: Sequence[Frame], ages: Sequence[Age] = ()
    ) -> list[PrefixKey]:
        with self._opened():
            dropped: list[PrefixKey] = []
            for block, frame in zip(ids, frames, strict=True):
                held = self._blocks.get(block.key)
                lasting = slice(None if frame.part is Part.WHOLE else self._lasting_bytes)
                data = bytes(frame.buffer[lasting]).ljust(len(frame.buffer), b"\xee")
                if held is not None and held[0] == block:
                    if frame.part is Part.WHOLE and block.key in self._without_windows:
                        self._without_windows.discard(block.key)
                        self._blocks[block.key] = (block, data)
                    continue
                if self._random.random() < self.fault_rate:
                    dropped.append(block.key)
                    continue
                self._take_out([block.key])
                self._guard.moved(block.scope, self._block_bytes)
                dropped += self._make_room()
                if len(self._blocks) >= self._capacity:
                    dropped.append(block.key)
                    self._guard.moved(block.scope, -self._block_bytes)
                    continue
                self._blocks[block.key] = (block, data)
                if frame.part is not Part.WHOLE:
                    self._without_windows.add(block.key)
                self._counts["stored"] += held is None
                if self._window_loss and self._random.random() < self._window_loss:
                    self._without_windows.add(self._random.choice(list(self._blocks)))
            return dropped

    def _make_room(self) -> list[PrefixKey]:
        dropped: list[PrefixKey] = []
        while len(self._blocks) >= self._capacity:
            ages = ((key, block.scope) for key, (block, _) in self._blocks.items())
            victim = next((key for key, scope in ages if not self._guard.spares(key, scope)), None)
            if victim is None:
                break
            dropped += self._take_out([victim])
            self._counts["evicted"] += 1
        return dropped

    def _take_out(self, keys: Sequence[PrefixKey]) -> list[PrefixKey]:
        gone = [key for key in keys if key in self._blocks]
        self._without_windows.difference_update(gone)
        for key in gone:
            block, _ = self._blocks.pop(key)
            self._guard.moved(block.scope, -self._block_bytes)
        return gone

    def discard(self, keys: Sequence[PrefixKey]) -> int:
        with self._opened():
            return len(self._take_out([key for key in keys if not self._guard.keeps(key)]))

    def keep(self, keys: Collection[PrefixKey]) -> None:
        self._guard.keep(frozenset(keys))

    def quotas(self) -> Mapping[Hashable, tuple[int, int]]:
        return self._guard.usage()

    def have_windows(self, ids: Sequence[BlockId]) -> list[bool]:
        with self._opened():
            keys = [block.key for block in ids]
            return [key in self._blocks and key not in self._without_windows for key in keys]

    def demoted(
        self, keys: Sequence[PrefixKey], idle_s: Sequence[float], windows: Sequence[bool] = ()
    ) -> None:
        with self._opened():
            for key in keys:
                if key in self._blocks:
                    self._blocks.move_to_end(key)

    def held(self, keys: Sequence[PrefixKey]) -> list[bool]:
        with self._opened():
            return [key in self._blocks for key in keys]

    def trace(self, key: PrefixKey) -> BlockId | None:
        with self._opened():
            held = self._blocks.get(key)
            return held[0] if held else None

    def purge(self, roots: Collection[PrefixKey]) -> Removed:
        with self._opened():
            to_delete = [key for key, (block, _) in self._blocks.items() if block.scope in roots]
            nbytes = len(self._take_out(to_delete)) * self._block_bytes
            return Removed(len(to_delete), nbytes, nbytes)

    def count(self, roots: Collection[PrefixKey]) -> int:
        with self._opened():
            return sum(block.scope in roots for block, _ in self._blocks.values())

    def flush(self) -> None:
        pass

    def stats(self) -> TierStats:
        num_blocks, size = len(self._blocks), self._block_bytes
        return TierStats(
            name=self.name,
            num_blocks=num_blocks,
            used_bytes=num_blocks * size,
            logical_bytes=num_blocks * size,
            capacity_bytes=self._capacity * size,
            hits=self._counts["hits"],
            misses=self._counts["misses"],
            stored=self._counts["stored"],
            evicted=self._counts["evicted"],
            read_bytes=self._counts["hits"] * size,
            written_bytes=self._counts["stored"] * size,
            faults=dict(self._faults),
        )

    def close(self) -> None:
        self._closed = True

    @contextmanager
    def _opened(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise TierClosed("the tier in memory is closed")
            yield


WRITES = (StoreJob, WriterTask)


class SteppedMover(Mover):
    """A mover that does its jobs when the simulation says so, in an order drawn from a seed; those
    of the one writer in their own."""

    def __init__(
        self,
        tier: MemoryTier,
        *,
        seed: int = 0,
        max_jobs: int = 8,
        fail_rate: float = 0.05,
        late_rate: float = 0.0,
    ) -> None:
        """`fail_rate` is the probability that a whole load fails, and `late_rate` that it is told
        of only after jobs that are done later."""
        super().__init__(tier, num_readers=1)
        self._memory = tier
        self._random = random.Random(seed)
        self._max_jobs = max_jobs
        self._fail_rate = fail_rate
        self._late_rate = late_rate
        self._lateness = random.Random(seed)
        self._jobs: list[Job] = []
        self._untold: list[Job] = []

    def start(self, *, writer_niceness: int = 10) -> None:
        pass

    def close(self) -> None:
        self.run(len(self._jobs))
        self._tell()

    def submit(self, job: Job) -> bool:
        stores = isinstance(job, StoreJob)
        num_alike = sum(isinstance(other, StoreJob) is stores for other in self._jobs)
        if num_alike >= self._max_jobs and not isinstance(job, WriterTask):
            return False
        self._jobs.append(job)
        return True

    @property
    def num_jobs(self) -> int:
        return len(self._jobs) + len(self._untold)

    @property
    def store_room(self) -> int:
        return self._max_jobs - sum(isinstance(job, StoreJob) for job in self._jobs)

    def run(self, num_jobs: int) -> None:
        """Do some of the jobs. A store never sees frames that a load has yet to fill."""
        self._tell()
        for _ in range(min(num_jobs, len(self._jobs))):
            number = self._random.randrange(len(self._jobs))
            if isinstance(self._jobs[number], WRITES):
                number = next(n for n, job in enumerate(self._jobs) if isinstance(job, WRITES))
            loads = isinstance(self._jobs[number], LoadJob)
            fails = loads and self._random.random() < self._fail_rate
            job = self._jobs[number]
            self.run_job(number, fails=fails)
            if loads and self._lateness.random() < self._late_rate:
                job.done = False
                self._untold.append(job)

    def _tell(self) -> None:
        for job in self._untold:
            job.done = True
        self._untold.clear()

    def read(self) -> None:
        """Do every job except the writer's."""
        self._tell()
        while reads := [n for n, job in enumerate(self._jobs) if not isinstance(job, WRITES)]:
            self.run_job(reads[0])

    def run_job(self, number: int, *, fails: bool = False) -> None:
        """Do the job at position `number` in the queue."""
        job = self._jobs.pop(number)
        if fails:
            job.fail()
        else:
            job.run(self._memory)
        job.done = True
