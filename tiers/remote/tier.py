"""The remote tier: the disk's records in a store that several servers share, verified on arrival.

A record from outside is never trusted. Its header must match its own checksum and the identity that
was requested, and its payload must match the checksum in the header. Only then is it decoded. A
record that fails is a miss and is deleted. A slow or absent store is a miss too: each call has a
time limit, and after a few failures no call is made for a while.

Readers call `probe` and `load`. Nobody waits for publishing: keys go into a bounded queue, and one
thread reads their records from the disk and sends them.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from queue import Empty, Full, Queue
from typing import TypeVar

from tiers.blocks.frames import Frame
from tiers.blocks.keys import BlockId, PrefixKey
from tiers.blocks.layout import BlockLayout
from tiers.blocks.part import Part
from tiers.disk.format.codec import DecodeError
from tiers.disk.format.payload import decode
from tiers.disk.format.record import check_payload, is_block, unpack_header
from tiers.disk.reader import Scratch
from tiers.errors import MissReason
from tiers.remote.breaker import Breaker
from tiers.remote.objects import DELETE_AT_ONCE, ObjectStore, RemoteError
from tiers.remote.seal import Seal
from tiers.tier import Loaded, Removed, TierName, TierStats
from tiers.transfer.economy import LoadEconomy
from tiers.transfer.mover import BLOCKS_PER_LOAD

logger = logging.getLogger(__name__)

MAX_WAITING = 4096  # keys to publish; further ones are dropped until they next qualify
NAMESPACE = "cachesvc/v1"
LOG_EVERY_S = 30.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class AwaitedBlocks:
    """Blocks that a caller waits for. `sent` becomes the number of leading ones in the store."""

    keys: Sequence[PrefixKey]
    sent: "Future[int]" = field(default_factory=Future)


Record = Callable[[PrefixKey], tuple[PrefixKey, bytes] | None]


def object_name(scope: PrefixKey, key: PrefixKey) -> str:
    """The name of a block's object. The scope comes first, so that a purge can list it."""
    return f"{NAMESPACE}/{scope.hex()}/{key.hex()}"


class RemoteTier:
    """Verified records in an `ObjectStore`. `read_record` returns a block's scope and record."""

    name = TierName.REMOTE

    def __init__(
        self,
        objects: ObjectStore,
        layout: BlockLayout,
        read_record: Record,
        *,
        seal: Seal | None = None,
        breaker: Breaker | None = None,
    ) -> None:
        self._objects = objects
        self._block_bytes = layout.nbytes
        self._part_bytes = {part: layout.part_nbytes(part) for part in Part}
        self._block_tokens = layout.block_size
        self._layout_digest = layout.digest()
        self._read_record = read_record
        self._seal = seal
        self.breaker = breaker or Breaker()
        self.economy = LoadEconomy()
        self._scratch = Scratch(layout.torch_dtype.itemsize)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._faults: Counter[MissReason] = Counter()
        self._logged_s = -LOG_EVERY_S
        self._publishing = threading.Lock()  # a removal waits for the block being sent
        self._waiting: Queue[PrefixKey | AwaitedBlocks | None] = Queue(MAX_WAITING)
        self._publisher = threading.Thread(
            target=self._publish_all, name="cachesvc-remote-write", daemon=True
        )
        self._publisher.start()

    # Calls of readers.

    def probe(self, ids: Sequence[BlockId]) -> int:
        found = self.exist(ids)
        return next((at for at, there in enumerate(found) if not there), len(found))

    def pays(self, num_blocks: int, num_readers: int) -> bool:
        """Whether so many readers, as far as there are jobs, load faster than computing."""
        num_tokens, nbytes = num_blocks * self._block_tokens, num_blocks * self._block_bytes
        readers = min(num_readers, -(-num_blocks // BLOCKS_PER_LOAD))
        return not num_blocks or self.economy.worth(num_tokens, nbytes, readers)

    def exist(self, ids: Sequence[BlockId]) -> list[bool]:
        """Whether the store has each of these, or a part of it. False without an answer."""
        found = self._call(lambda: self._objects.exists([_name(block) for block in ids]))
        return [False] * len(ids) if found is None else list(found)

    def load(self, ids: Sequence[BlockId], into: Sequence[Frame]) -> Loaded:
        """Fill `into[i]` with block `ids[i]`, verified, up to the first that fails."""
        wanted = ids[: len(into)]
        started = time.perf_counter()
        reasons: list[MissReason | None] = [MissReason.ABSENT] * len(wanted)
        sizes = [0] * len(wanted)

        def take(number: int, data: memoryview) -> None:
            reasons[number] = self._fill(wanted[number], data, into[number])
            sizes[number] = len(data)

        def read() -> bool:
            self._objects.read([_name(block) for block in wanted], take)
            return True

        if self._call(read) is None:
            return Loaded(0, MissReason.IO_ERROR)
        refused = ((number, why) for number, why in enumerate(reasons) if why is not None)
        num_loaded, reason = next(refused, (len(wanted), None))
        read_bytes = sum(sizes[:num_loaded])
        self.economy.observe_load(num_loaded * self._block_bytes, time.perf_counter() - started)
        with self._lock:
            self._counts["hits"] += num_loaded
            self._counts["misses"] += len(wanted) - num_loaded
            self._counts["read_bytes"] += read_bytes
        if reason is not None and reason is not MissReason.ABSENT:
            self._refuse(wanted[num_loaded], reason)
        return Loaded(num_loaded, reason)

    def _fill(self, block: BlockId, data: memoryview, frame: Frame) -> MissReason | None:
        """Verify a record and decode it. Returns the reason if it is not valid."""
        if self._seal is not None:
            opened = self._seal.open(_name(block), data)
            if opened is None:
                return MissReason.CHECKSUM
            data = memoryview(opened)
        header = unpack_header(data)
        if isinstance(header, MissReason):
            return header
        nbytes = int.from_bytes(data[12:16], "little")
        if not is_block(bytes(data[:nbytes]), block):
            return MissReason.COLLISION
        expected = self._part_bytes[header.part]
        if header.layout != self._layout_digest or header.logical_nbytes != expected:
            return MissReason.LAYOUT
        if header.part not in (Part.WHOLE, frame.part):
            return MissReason.ABSENT  # the disk it came from had no more of the block
        payload = data[nbytes : nbytes + header.payload_nbytes]
        why = check_payload(header, payload)
        if why is not None:
            return why
        try:
            decode(self._scratch.codec, header, payload, frame.buffer, frame.part)
        except DecodeError:
            return MissReason.DECODE
        return None

    def _refuse(self, block: BlockId, why: MissReason) -> None:
        """Count an invalid record and delete it, so that a valid one can replace it. Also a valid
        record of another block: it would be found, loaded and refused each time."""
        self._fault(why, f"block {block.key.hex()} is not as it was written")
        self._call(lambda: self._objects.delete([_name(block)]))

    # Publishing.

    def publish(self, keys: Iterable[PrefixKey]) -> None:
        """Queue these blocks, which the disk holds, to be sent. Returns at once."""
        for key in keys:
            try:
                self._waiting.put_nowait(key)
            except Full:
                with self._lock:
                    self._counts["dropped"] += 1

    def deliver(self, keys: Sequence[PrefixKey]) -> "Future[int]":
        """Like `publish`, with a result: how many of the leading blocks the store then has."""
        delivery = AwaitedBlocks(keys)
        try:
            self._waiting.put_nowait(delivery)
        except Full:
            delivery.sent.set_result(0)
        return delivery.sent

    def _publish_all(self) -> None:
        try:
            self._call(lambda: self._objects.exists([NAMESPACE]))  # its failure is told at once
        except Exception:  # the top of this thread
            logger.exception("the remote tier failed to look at its store")
        while (key := self._waiting.get()) is not None:
            try:
                if isinstance(key, AwaitedBlocks):
                    self._deliver(key)
                    continue
                with self._publishing:
                    self._publish(key)
            except Exception:  # the top of this thread
                logger.exception("the remote tier failed to publish a block")
            finally:
                self._waiting.task_done()

    def _deliver(self, delivery: AwaitedBlocks) -> None:
        num_sent = 0
        try:
            for key in delivery.keys:
                with self._publishing:
                    if not self._publish(key):
                        break
                num_sent += 1
        finally:
            delivery.sent.set_result(num_sent)

    def _publish(self, key: PrefixKey) -> bool:
        """Send a block if the store lacks it. Returns whether the store has it now."""
        if self.breaker.is_open:
            return False
        found = self._read_record(key)
        if found is None:
            return False
        scope, record = found
        name = object_name(scope, key)
        there = self._call(lambda: self._objects.exists([name]))
        if there is None or there[0]:
            return there is not None
        sealed = record if self._seal is None else self._seal.seal(name, record)

        def put() -> bool:
            self._objects.put(name, sealed)
            return True

        if not self._call(put):
            return False
        with self._lock:
            self._counts["stored"] += 1
            self._counts["written_bytes"] += len(sealed)
        return True

    # Calls of operators. These raise RemoteError, since an operator must know whether a removal
    # failed.

    def discard(self, scoped: Sequence[tuple[PrefixKey, PrefixKey]]) -> int:
        """Delete these (scope, key) pairs, which the disk has no more. Returns how many were."""
        if not scoped:
            return 0
        with self._publishing:
            return self._objects.delete([object_name(*pair) for pair in scoped])

    def purge(self, roots: Collection[PrefixKey]) -> Removed:
        """Delete every block of these scopes. They are already gone from the disk."""
        num_blocks = 0
        with self._publishing:
            for root in roots:
                names = self._objects.names(f"{NAMESPACE}/{root.hex()}/")
                while some := list(islice(names, DELETE_AT_ONCE)):
                    num_blocks += self._objects.delete(some)
        return Removed(num_blocks, 0, num_blocks * self._block_bytes)

    def count(self, roots: Collection[PrefixKey]) -> int:
        starts = [f"{NAMESPACE}/{root.hex()}/" for root in roots]
        return sum(1 for start in starts for _ in self._objects.names(start))

    def stats(self) -> TierStats:
        """This server's use of the store. Only the store itself knows how full it is."""
        with self._lock:
            counts, faults = self._counts, Counter(self._faults)
            faults[MissReason.IO_ERROR] += self._objects.num_failed
            return TierStats(
                name=self.name,
                hits=counts["hits"],
                misses=counts["misses"],
                stored=counts["stored"],
                read_bytes=counts["read_bytes"],
                written_bytes=counts["written_bytes"],
                faults=dict(+faults),
            )

    def close(self) -> None:
        """End the publisher, after the block that it is sending, and close the connections."""
        while True:
            try:
                left = self._waiting.get_nowait()
            except Empty:
                break
            if isinstance(left, AwaitedBlocks):
                left.sent.set_result(0)
        self._waiting.put(None)
        self._publisher.join()
        self._objects.close()

    def _call(self, work: Callable[[], T]) -> T | None:
        """The store's answer. None if the call fails or the breaker is open."""
        if not self.breaker.allows():
            return None
        try:
            answer = work()
        except RemoteError as error:
            self.breaker.failed()
            self._fault(MissReason.IO_ERROR, str(error))
            return None
        self.breaker.succeeded()
        return answer

    def _fault(self, why: MissReason, what: str) -> None:
        now = time.monotonic()
        with self._lock:
            self._faults[why] += 1
            quiet = now - self._logged_s < LOG_EVERY_S
            if not quiet:
                self._logged_s = now
        if not quiet:
            logger.warning(f"remote cache: {what} ({why})")


def _name(block: BlockId) -> str:
    return object_name(block.scope, block.key)
