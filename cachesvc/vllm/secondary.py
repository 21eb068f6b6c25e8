"""The disk tier under vLLM's own offload, as one of its secondary tiers.

    vllm serve MODEL --kv-transfer-config '{
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 34359738368,
            "secondary_tiers": [{"type": "cachesvc", "dir": "/nvme/kv", "bytes": "1TiB"}]}}'

vLLM has the chunks in GPU and host memory. What it stores is cascaded here, and what it looks up
and lacks is promoted from here. The scheduler's thread asks and hands over; threads of this tier
read and write. A chunk is a record of `tiers.disk`: found by the key that vLLM gave it, verified by
that key, our scope and a checksum, bounded by bytes on the file system, readable after a crash.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import vllm
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from cachesvc.config.quantities import parse_size
from cachesvc.model_files import UnsupportedKv, weights_digest
from cachesvc.offload import (
    PIECE,
    GivenFrames,
    check_options,
    load_all,
    opaque_id,
    opaque_layout,
    open_folder,
)
from cachesvc.vllm.identity import device_name
from tiers.blocks.frames import Frame
from tiers.blocks.keys import KEY_BYTES, BlockId, CacheScope, PrefixKey
from tiers.blocks.layout import BlockLayout

logger = logging.getLogger(__name__)

LOOKUP_S = 2.0  # then a key that the disk does not answer for is a miss
FLUSH_S = 5.0  # between writings of what was stored, so that it outlives a power cut


class Moved(NamedTuple):
    """The keys of a job that were read or written, and the seconds that it took."""

    done: list[bytes]
    seconds: float


@dataclass(slots=True)
class Running:
    """A job of vLLM's, and the work that does it."""

    keys: Sequence[bytes]
    is_load: bool
    work: list[Future[Moved]] = field(default_factory=list)


class Lookups(AsyncLookupManager):  # type: ignore[misc]
    """Whether keys are held, asked by a thread of its own, so that no step waits for the disk."""

    def __init__(self, tier: "CachesvcTier", tier_type: str) -> None:
        super().__init__(tier_type)
        self._tier = tier

    def batch_lookup(self, keys: list[bytes], req_context: Any) -> Iterable[bool]:
        return self._tier.held(keys)


class CachesvcTier(SecondaryTierManager):  # type: ignore[misc]
    """A folder of records below vLLM's host memory. The scheduler's thread, but for `held`."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        """Raises ValueError for options that cannot be used, and TierError for a folder."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality.LOCAL
        check(options)
        config = offloading_spec.config
        layout = opaque_layout(self.block_size_bytes, config.model.dtype)
        self._root = scope_of(config, layout, str(options.get("scope", ""))).root()
        self._view = primary_kv_view.cast("B")
        folder, num_bytes = Path(options["dir"]).expanduser(), parse_size(options["bytes"])
        compresses: bool = options.get("compress", True)
        self._disk = open_folder(folder, num_bytes, layout, compresses=compresses)
        self._tells: bool = options.get("enable_kv_events", False)
        self._events: deque[OffloadingEvent] = deque()
        self._stored: dict[PrefixKey, bytes] = {}  # of this run, to tell what leaves
        self._running: dict[int, Running] = {}
        self._since_s: dict[str, float] = {}  # of requests that wait for an answer
        self._is_dirty, self._flushed_s = False, time.monotonic()
        readers = self._disk.num_readers
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="cachesvc-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="cachesvc-write")
        self._lookups = Lookups(self, tier_type)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """RETRY until the disk has answered, but not for longer than LOOKUP_S."""
        found = self._lookups.lookup(key, req_context)
        if found is None:
            now_s = time.monotonic()
            waits_s = now_s - self._since_s.setdefault(req_context.req_id, now_s)
            return LookupResult.RETRY if waits_s < LOOKUP_S else LookupResult.MISS
        self._since_s.pop(req_context.req_id, None)
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()
        now_s = time.monotonic()
        if self._is_dirty and now_s - self._flushed_s > FLUSH_S:
            self._is_dirty, self._flushed_s = False, now_s
            self._writer.submit(self._disk.flush)

    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.cleanup(req_context.req_id)
        self._since_s.pop(req_context.req_id, None)

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        mine = [self._id(key).key for key in keys]
        self._disk.demoted(mine, [0.0] * len(mine))

    def submit_load(self, job_metadata: Any) -> None:
        keys, frames = list(job_metadata.keys), self._frames(job_metadata)
        pieces = [slice(at, at + PIECE) for at in range(0, len(keys), PIECE)]
        work = [self._readers.submit(self._load, keys[part], frames[part]) for part in pieces]
        self._running[job_metadata.job_id] = Running(keys, True, work)

    def submit_store(self, job_metadata: Any) -> None:
        keys, frames = list(job_metadata.keys), self._frames(job_metadata)
        work = [self._writer.submit(self._store, keys, frames)]
        self._running[job_metadata.job_id] = Running(keys, False, work)
        self._is_dirty = True

    def get_finished_jobs(self) -> list[JobResult]:
        ended = [
            number
            for number, running in self._running.items()
            if all(each.done() for each in running.work)
        ]
        return [self._result(number, self._running.pop(number)) for number in ended]

    def take_events(self) -> Iterable[OffloadingEvent]:
        while self._events:
            yield self._events.popleft()

    def drain_jobs(self) -> None:
        """vLLM is about to forget what it has cached, maybe because its weights are others from now
        on. Nothing from before is found again, nor by another start what is stored from then on."""
        wait([each for running in self._running.values() for each in running.work])
        self._root = PrefixKey(os.urandom(KEY_BYTES))

    def shutdown(self) -> None:
        """Ends the threads, writes what they have begun, and closes the folder."""
        self._lookups.shutdown()
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown(cancel_futures=True)
        self._disk.close()
        self._view.release()

    def held(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each is held, by key alone. Any thread."""
        return self._disk.held([self._id(key).key for key in keys])

    def _id(self, key: bytes) -> BlockId:
        return opaque_id(self._root, key)

    def _frames(self, job: Any) -> list[Frame]:
        """vLLM's chunks in host memory."""
        size = self.block_size_bytes
        starts = [int(number) * size for number in job.chunk_ids]
        return GivenFrames([self._view[start : start + size] for start in starts]).frames()

    def _load(self, keys: Sequence[bytes], frames: Sequence[Frame]) -> Moved:
        """Reads all that can be served. Reader threads."""
        began_s, ids = time.perf_counter(), [self._id(key) for key in keys]
        served = load_all(self._disk, ids, frames)
        done = [key for key, is_served in zip(keys, served, strict=True) if is_served]
        return Moved(done, time.perf_counter() - began_s)

    def _store(self, keys: Sequence[bytes], frames: Sequence[Frame]) -> Moved:
        """Writes what is not held yet. The writer thread."""
        began_s, ids = time.perf_counter(), [self._id(key) for key in keys]
        gone = self._disk.store(ids, frames)
        if self._tells:
            self._stored.update({each.key: key for each, key in zip(ids, keys, strict=True)})
            self._tell([self._stored.pop(key) for key in gone if key in self._stored], removed=True)
        lost = set(gone)
        done = [key for each, key in zip(ids, keys, strict=True) if each.key not in lost]
        self._tell(done, removed=False)
        return Moved(done, time.perf_counter() - began_s)

    def _drop(self, keys: Sequence[bytes]) -> None:
        """Removes records that could not be read, so that nobody finds them again. The writer
        thread."""
        self._disk.discard([self._id(key).key for key in keys])
        self._tell(keys, removed=True)

    def _tell(self, keys: Sequence[bytes], *, removed: bool) -> None:
        if self._tells and keys:
            event = OffloadingEvent(list(keys), self.medium, removed, self.locality)
            self._events.append(event)

    def _result(self, number: int, running: Running) -> JobResult:
        outcomes = []
        for each in running.work:
            if (error := each.exception()) is not None:
                logger.error(f"cachesvc: a job of {len(running.keys)} chunks failed: {error!r}")
            else:
                outcomes.append(each.result())
        done = [key for outcome in outcomes for key in outcome.done]
        if running.is_load and len(done) < len(running.keys):
            served = set(done)
            failed = [key for key in running.keys if key not in served]
            self._lookups.mark_miss(failed)
            self._writer.submit(self._drop, failed)
        return JobResult(
            job_id=number,
            success=len(done) == len(running.keys),
            successful_keys=tuple(done) if running.is_load and done else None,
            transfer_time=max((each.seconds for each in outcomes), default=0.0),
            transfer_bytes=len(done) * self.block_size_bytes,
        )


def check(options: Mapping[str, Any]) -> None:
    """Raises ValueError for what is missing or unknown in a configuration of this tier."""
    if "node" in options:
        raise ValueError(
            "the cachesvc tier keeps a dir and uses no node; engines that share blocks through "
            "a `cachesvc node` have CachesvcConnector in place of OffloadingConnector"
        )
    check_options(
        options,
        needed=("dir", "bytes"),
        known=("scope", "compress", "enable_kv_events"),
        example='{"type": "cachesvc", "dir": "/nvme/kv", "bytes": "1TiB"}',
    )


def scope_of(config: Any, layout: BlockLayout, extra: str) -> CacheScope:
    """All that a chunk's bytes depend on beside its key, as far as vLLM tells it here."""
    parallel = config.parallel
    facts = (
        f"vllm {vllm.__version__}",
        f"device {device_name()}",
        *(repr(group) for group in config.groups),
        repr((config.model.dtype, config.cache, config.worker_kv_bytes_per_block)),
        repr((parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size)),
        repr((config.canonical_layout, config.kv_cache_layout, config.replicated_layout)),
    )
    try:
        weights = weights_digest(config.model.name, None, is_sole=not extra)
    except UnsupportedKv as error:
        raise ValueError(f"the cachesvc tier cannot be used: {error}") from None
    described = "\n".join(facts).encode()
    return CacheScope(weights=weights, layout=layout.digest() + described, content=extra.encode())
