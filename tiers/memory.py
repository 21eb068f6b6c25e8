"""A tier in memory and a mover without threads, for simulations: faults and delays by a seed."""

import random
from collections import Counter, OrderedDict
from collections.abc import Sequence

from tiers.errors import MissReason
from tiers.frames import Frame
from tiers.keys import BlockId, PrefixKey
from tiers.mover import Job, LoadJob, Mover, StoreJob
from tiers.tier import Loaded, TierName, TierStats


class MemoryTier:
    """A `Tier` of at most `capacity_blocks` blocks, first in, first out.

    `fault_rate` is the chance that a load or a store of a block fails.
    """

    name = TierName.DISK

    def __init__(self, capacity_blocks: int, *, fault_rate: float = 0.0, seed: int = 0) -> None:
        self._capacity = capacity_blocks
        self.fault_rate = fault_rate
        self._random = random.Random(seed)
        self._blocks: OrderedDict[PrefixKey, tuple[BlockId, bytes]] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._faults: Counter[MissReason] = Counter()

    def probe(self, ids: Sequence[BlockId]) -> int:
        for number, identity in enumerate(ids):
            if identity.key not in self._blocks:
                return number
        return len(ids)

    def load(self, ids: Sequence[BlockId], into: Sequence[Frame]) -> Loaded:
        for number, (identity, frame) in enumerate(zip(ids, into, strict=True)):
            held = self._blocks.get(identity.key)
            reason = None
            if held is None:
                reason = MissReason.ABSENT
            elif held[0] != identity:
                reason = MissReason.COLLISION
            elif self._random.random() < self.fault_rate:
                reason = MissReason.CHECKSUM
            if held is None or reason is not None:
                frame.buffer[:] = b"\xee" * len(frame.buffer)  # whoever reads it will notice
                self._faults[reason or MissReason.ABSENT] += 1
                return Loaded(number, reason)
            frame.buffer[:] = held[1]
            self._counts["hits"] += 1
        return Loaded(len(ids), None)

    def store(self, ids: Sequence[BlockId], frames: Sequence[Frame]) -> list[PrefixKey]:
        dropped: list[PrefixKey] = []
        for identity, frame in zip(ids, frames, strict=True):
            if self._random.random() < self.fault_rate:
                dropped.append(identity.key)
                continue
            self._blocks[identity.key] = (identity, bytes(frame.buffer))
            self._counts["stored"] += 1
            while len(self._blocks) > self._capacity:
                dropped.append(self._blocks.popitem(last=False)[0])
                self._counts["evicted"] += 1
        return dropped

    def discard(self, keys: Sequence[PrefixKey]) -> int:
        return sum(self._blocks.pop(key, None) is not None for key in keys)

    def flush(self) -> None:
        pass

    def stats(self) -> TierStats:
        return TierStats(
            name=self.name,
            num_blocks=len(self._blocks),
            hits=self._counts["hits"],
            stored=self._counts["stored"],
            evicted=self._counts["evicted"],
            faults=dict(self._faults),
        )

    def close(self) -> None:
        pass


class SteppedMover(Mover):
    """A mover whose jobs are done when the simulation says so, in an order drawn from a seed."""

    def __init__(self, tier: MemoryTier, *, seed: int = 0, max_jobs: int = 8) -> None:
        super().__init__(tier, num_readers=0)
        self._memory = tier
        self._random = random.Random(seed)
        self._max_jobs = max_jobs
        self._jobs: list[Job] = []

    def start(self) -> None:
        pass

    def close(self) -> None:
        self.run(len(self._jobs))

    def submit(self, job: Job) -> bool:
        if sum(
            isinstance(other, StoreJob) is isinstance(job, StoreJob) for other in self._jobs
        ) >= (self._max_jobs):
            return False
        self._jobs.append(job)
        return True

    @property
    def store_room(self) -> int:
        return self._max_jobs - sum(isinstance(job, StoreJob) for job in self._jobs)

    def run(self, num_jobs: int) -> None:
        """Do some of the jobs; a store never sees frames that a load is still to fill."""
        for _ in range(min(num_jobs, len(self._jobs))):
            job = self._jobs.pop(self._random.randrange(len(self._jobs)))
            if isinstance(job, LoadJob) and self._random.random() < 0.05:
                job.fail()
            else:
                job.run(self._memory)
            job.done = True
