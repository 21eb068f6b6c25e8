"""The disk tier below SGLang's host memory, as a storage backend of its HiCache.

    python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache
        --hicache-mem-layout page_first --hicache-storage-backend dynamic
        --hicache-storage-backend-extra-config '{"backend_name": "cachesvc",
            "module_path": "cachesvc.sglang.storage", "class_name": "CachesvcStorage",
            "dir": "/nvme/kv", "bytes": "1TiB", "hicache_storage_pass_prefix_keys": true}'

SGLang has pages in GPU and host memory. Its threads ask here what is held, and load and store pages
in place. A page has pieces, such as its keys and its values. A piece is a record of `tiers.disk`:
found by SGLang's hash of the page, verified by it, our scope and a checksum. A page is held if all
its pieces are.
"""

import ctypes
import logging
import math
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from sglang.srt.mem_cache import hicache_storage as hicache
from sglang.srt.runtime_context import get_server_args, get_serving
from sglang.srt.utils import get_device_name

from cachesvc import offload
from cachesvc.config.quantities import parse_size
from cachesvc.model_files import UnsupportedKv, weights_digest
from tiers.blocks.frames import Frame
from tiers.blocks.keys import KEY_BYTES, BlockId, CacheScope, PrefixKey
from tiers.blocks.layout import BlockLayout
from tiers.disk.guest import GuestTier
from tiers.disk.readers import readers_for
from tiers.disk.tier import DiskTier

logger = logging.getLogger(__name__)

LAYOUTS = ("page_first", "page_first_direct")
LOOKUP_S = 2.0  # then the disk counts as hanging, and nothing as held until it answers
FLUSH_S = 5.0  # while pages are stored, between what makes them outlive a power cut
_ITS_OWN = ("backend_name", "module_path", "class_name", "interface_v1")  # SGLang's, of the options
_EXAMPLE = '{"backend_name": "cachesvc", ..., "dir": "/nvme/kv", "bytes": "1TiB"}'
_ARGUMENTS = (
    *("dtype", "quantization", "attention_backend", "json_model_override_args"),
    *("prefill_attention_backend", "decode_attention_backend", "load_format", "modelopt_quant"),
    *("kv_cache_dtype", "quantization_param_path", "rl_quant_profile"),
)
_FACTS = ("layer_num", "start_layer", "end_layer", "page_size", "layout", "dtype")

KV = hicache.PoolName.KV
Tier = DiskTier | GuestTier
Page = list[memoryview]  # its pieces
Done = list[bool]  # by page


@dataclass
class Stats:
    """SGLang's `StorageMetrics` since the last call: pages, and GB/s, of each load and store."""

    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


class HostPool:
    """A host pool of SGLang's, whose pages have pieces of these layouts."""

    def __init__(self, name: str, host: Any) -> None:
        """Raises ValueError for pools that have no pages in place."""
        layout = getattr(host, "layout", None)
        if layout not in LAYOUTS:
            raise ValueError(
                f"the cachesvc tier needs --hicache-mem-layout {' or '.join(LAYOUTS)}: the pool "
                f"{name!r} is {layout}"
            )
        _, sizes = host.get_page_buffer_meta(np.zeros(host.page_size, np.int64)) or ((), ())
        if not sizes:
            raise ValueError(f"the cachesvc tier cannot be used: the pool {name!r} has no bytes")
        dtype = str(host.dtype).removeprefix("torch.")
        self.host, self.sizes = host, tuple(int(size) for size in sizes)
        self.layouts = [offload.opaque_layout(size, dtype) for size in self.sizes]
        self.root = PrefixKey(b"")  # of the scope, once it is known
        self.parts: list[tuple[Tier, list[int]]] = []  # tiers, and the pieces that they have

    def described(self) -> str:
        facts = [getattr(self.host, name, None) for name in _FACTS]
        return repr((type(self.host).__name__, *facts, self.sizes))

    def ids(self, keys: Iterable[str], pieces: Sequence[int]) -> list[BlockId]:
        """Of these pieces, page by page."""
        names = [f"{key}.{piece}".encode() for key in keys for piece in pieces]
        return [offload.opaque_id(self.root, name) for name in names]

    def keys(self, keys: Iterable[str], pieces: Sequence[int] | None = None) -> list[PrefixKey]:
        """The same as keys of records, by default of all pieces."""
        numbers = range(len(self.sizes)) if pieces is None else pieces
        return [each.key for each in self.ids(keys, numbers)]

    def pages(self, host_indices: Any) -> list[Page]:
        """The pages that begin at each of SGLang's indices, where they lie."""
        places = zip(*self.host.get_page_buffer_meta(host_indices), strict=True)
        pieces, count = [_memory(*place) for place in places], len(self.sizes)
        return [pieces[at : at + count] for at in range(0, len(pieces), count)]

    def whole(self, num_pages: int, ask: Callable[[Tier, list[int]], Done]) -> Done:
        """The pages all of whose pieces are so, as `ask` says of those of each tier."""
        told = [np.reshape(ask(*part), (num_pages, -1)) for part in self.parts]
        return [all(page) for page in np.hstack(told).tolist()]


class CachesvcStorage(hicache.HiCacheStorage):  # type: ignore[misc]
    """A folder of records below SGLang's host memory, one for each rank that stores.

    Threads of SGLang's call: one asks, one loads, one stores. A call that moves pages ends when
    nothing of them moves any more, so that SGLang may use their memory again.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """Raises ValueError for options that cannot be used."""
        extra = storage_config.extra_config
        given = {name: value for name, value in extra.items() if name not in _ITS_OWN}
        offload.check_options(
            given, needed=("dir", "bytes"), known=("scope", "compress"), example=_EXAMPLE
        )
        # SGLang asks for it once the backend is made. Without it, pages are copied on their way.
        if not extra.setdefault("interface_v1", 1) or storage_config.should_split_heads:
            raise ValueError("the cachesvc tier has no interface_v1 of 0, and no tp_lcm_size")
        self._extra_scope = str(given.get("scope", ""))
        self._compresses: bool = given.get("compress", True)
        self._config = config = storage_config
        # Latents are the same on each rank of tensor parallelism, and written by one.
        self._ranks = [("tp", config.tp_rank, config.tp_size)] if not config.is_mla_model else []
        self._ranks += [("pp", config.pp_rank, config.pp_size)]
        self._ranks += [("cp", config.attn_cp_rank, config.attn_cp_size)]
        name = "-".join(f"{kind}{rank}" for kind, rank, _ in self._ranks)
        self._folder = Path(given["dir"]).expanduser() / f"dp{config.dp_rank}-{name}"
        self._bytes = parse_size(given["bytes"])
        self._pools: dict[str, HostPool] = {}
        self._tiers: dict[BlockLayout, Tier] = {}
        self._disk: DiskTier | None = None
        self._writing, self._asking = threading.Lock(), threading.Lock()
        self._asked: Future[dict[str, Done]] | None = None
        self._lookups = ThreadPoolExecutor(1, thread_name_prefix="cachesvc-lookup")
        num_readers = readers_for(computes_elsewhere=True)
        self._readers = ThreadPoolExecutor(num_readers, thread_name_prefix="cachesvc-read")
        self._stats, self._flushed_s = Stats(), time.perf_counter()

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Raises ValueError for a pool that cannot be kept."""
        self.register_mem_host_pool_v2(mem_pool_host, KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """The same for pools beside that of KV."""
        name, config = str(host_pool_name), self._config
        if name == hicache.PoolName.MAMBA and config.is_mla_model and config.tp_size > 1:
            raise ValueError("the cachesvc tier keeps no states of each rank beside shared latents")
        self._version = get_server_args().weight_version
        self._pools[name] = pool = HostPool(name, host_pool)
        pool.root = self._scope(pool).root()
        if self._tiers:
            self._place(pool)

    def on_host_pools_registered(self) -> None:
        """Opens the folder. Raises DirectoryLocked and ConfigurationError."""
        pools = self._pools.values()
        if self._config.is_storage_writer:
            largest = max((e for pool in pools for e in pool.layouts), key=lambda e: e.nbytes)
            share = self._bytes // math.prod(size for _, _, size in self._ranks)
            self._disk = offload.open_folder(
                self._folder, share, largest, compresses=self._compresses
            )
            self._tiers[largest] = self._disk
        for pool in pools:
            self._place(pool)

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """How many pages from the front are held."""
        return _leading(self._held([KV], keys)[KV])

    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> hicache.PoolTransferResult:
        """The longest prefix that no pool lacks a part of, and all such lengths."""
        transfers = pool_transfers or []
        held = self._held([KV, *(each.name for each in transfers)], keys)
        num_pages = _leading(held[KV])
        hits = {KV: num_pages} if num_pages else {}
        restorable = [*range(1, num_pages + 1)]
        for transfer in transfers:
            if not restorable:
                break  # no verdict on the pools that are left
            ends = _ends(held[transfer.name][:num_pages], transfer)
            hits |= {transfer.name: max(ends)} if ends else {}
            restorable = [length for length in restorable if length in ends]
        return hicache.PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> Done:
        """Fills pages of KV in place, and says which."""
        pages = hicache.PoolTransfer(KV, host_indices, keys=keys)
        return self.batch_get_v2([pages], extra_info)[KV]

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> Done:
        """Stores pages of KV, and says which are held now."""
        pages = hicache.PoolTransfer(KV, host_indices, keys=keys)
        return self.batch_set_v2([pages], extra_info)[KV]

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, Done]:
        return {each.name: self._move(self._load, each, extra_info) for each in transfers}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, Done]:
        return {each.name: self._move(self._store, each, extra_info) for each in transfers}

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(self, *asked: Any, **more: Any) -> Any:
        raise NotImplementedError("the cachesvc tier moves pages in place: interface_v1 is on")

    set = batch_get = batch_set = get

    def clear(self) -> None:
        """Removes this engine's pages. Raises storage errors."""
        if self._disk is not None:
            with self._writing:
                self._disk.purge([pool.root for pool in self._pools.values()])

    def get_stats(self) -> Stats:
        stats, self._stats = self._stats, Stats()
        return stats

    def close(self) -> None:
        """Ends the threads, writes what they have begun, and closes the folder."""
        self._lookups.shutdown(wait=False, cancel_futures=True)
        self._readers.shutdown(cancel_futures=True)
        with self._writing:
            if self._disk is not None:
                self._disk.close()
                self._disk = None

    def _scope(self, pool: HostPool) -> CacheScope:
        """All that a page's bytes depend on beside its key. Raises ValueError."""
        served = get_server_args()
        told = [getattr(served, name, None) for name in _ARGUMENTS]
        device = f"{get_device_name()} {platform.machine()}"
        ranks = repr((told, self._config.tp_size, self._ranks))  # sums of more ranks differ in bits
        facts = (f"sglang {version('sglang')}", device, pool.described(), ranks)
        try:
            weights = weights_digest(served.model_path, served.revision)
        except UnsupportedKv as error:
            raise ValueError(f"the cachesvc tier cannot be used: {error}") from None
        content = self._extra_scope.encode()
        return CacheScope(weights=weights, layout="\n".join(facts).encode(), content=content)

    def _place(self, pool: HostPool) -> None:
        """Gives pieces the tier of their layout."""
        for layout in dict.fromkeys(pool.layouts):
            if layout not in self._tiers:
                own = self._disk.beside(layout) if self._disk is not None else None
                self._tiers[layout] = own or GuestTier(self._folder, layout)
            pieces = [number for number, each in enumerate(pool.layouts) if each == layout]
            pool.parts.append((self._tiers[layout], pieces))

    def _held(self, names: Sequence[str], keys: Sequence[str]) -> dict[str, Done]:
        """Which pages are held. None is, from when the disk has not answered for LOOKUP_S."""
        with self._asking:
            self._follow_weights()
            if self._asked is None or self._asked.done():
                self._asked = self._lookups.submit(self._look, names, keys)
                wait([self._asked], LOOKUP_S)
                error = self._asked.exception() if self._asked.done() else TimeoutError()
                if error is None:
                    return self._asked.result()
                logger.error(f"cachesvc: the disk was asked for {len(keys)} pages: {error!r}")
        return {name: [False] * len(keys) for name in names}

    def _follow_weights(self) -> None:
        """Nobody else finds pages of weights that were changed in place, nor those of before."""
        if (version := get_serving().weight_version) != self._version:
            for pool in self._pools.values():
                pool.root = PrefixKey(os.urandom(KEY_BYTES))
            self._version = version  # last: another thread must not go on with a root of before

    def _look(self, names: Sequence[str], keys: Sequence[str]) -> dict[str, Done]:
        def held(pool: HostPool) -> Done:
            return pool.whole(len(keys), lambda tier, some: tier.held(pool.keys(keys, some)))

        return {name: held(self._pools[name]) if keys else [] for name in names}

    def _move(self, how: Callable[..., Done], transfer: Any, extra_info: Any) -> Done:
        self._follow_weights()
        began_s, pool, keys = time.perf_counter(), self._pools[transfer.name], transfer.keys or []
        indices = transfer.host_indices if transfer.host_indices is not None else ()
        if not keys:
            return []
        if len(indices) != len(keys) * pool.host.page_size:
            logger.error(
                f"cachesvc: {len(indices)} places for {len(keys)} pages of {transfer.name}"
            )
            return [False] * len(keys)
        done = how(pool, keys, pool.pages(indices))
        if self._disk is not None:
            # A page leaves before those that it follows: without its front, a prefix is no hit.
            used = pool.keys([*(getattr(extra_info, "prefix_keys", None) or ()), *keys])
            self._disk.demoted(used[::-1], [0.0] * len(used))
        counts, rates = self._stats.prefetch_pgs, self._stats.prefetch_bandwidth
        if how == self._store:
            counts, rates = self._stats.backup_pgs, self._stats.backup_bandwidth
        counts.append(sum(done))
        rates.append(sum(done) * sum(pool.sizes) / (time.perf_counter() - began_s) / 1e9)
        return done

    def _load(self, pool: HostPool, keys: list[str], pages: list[Page]) -> Done:
        """Fills pages. What cannot be read is dropped, so that nobody finds it again."""
        spans = [slice(at, at + offload.PIECE) for at in range(0, len(keys), offload.PIECE)]
        work = [self._readers.submit(self._fill, pool, keys[each], pages[each]) for each in spans]
        wait(work)
        served = [ok for each in work for ok in each.result()]
        lost = [key for key, ok in zip(keys, served, strict=True) if not ok]
        if lost and self._disk is not None:
            with self._writing:
                self._disk.discard(pool.keys(lost))
        return served

    def _fill(self, pool: HostPool, keys: list[str], pages: list[Page]) -> Done:
        """Reader threads."""

        def load(tier: Tier, pieces: list[int]) -> Done:
            return offload.load_all(tier, pool.ids(keys, pieces), _frames(pages, pieces))

        return pool.whole(len(keys), load)

    def _store(self, pool: HostPool, keys: list[str], pages: list[Page]) -> Done:
        """Stores pages that are not held. Shared latents are written by one rank."""
        if self._disk is None:
            return [not self._config.is_storage_writer] * len(keys)

        def put(tier: Tier, pieces: list[int]) -> Done:
            assert isinstance(tier, DiskTier), tier
            ids = pool.ids(keys, pieces)
            lost = {*tier.store(ids, _frames(pages, pieces))}.intersection(each.key for each in ids)
            return tier.held(pool.keys(keys, pieces)) if lost else [True] * len(ids)

        with self._writing:
            stored = pool.whole(len(keys), put)
            if time.perf_counter() - self._flushed_s > FLUSH_S:
                self._disk.flush()
                self._flushed_s = time.perf_counter()
        return stored


def _memory(address: int, num_bytes: int) -> memoryview:
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


def _frames(pages: list[Page], pieces: list[int]) -> list[Frame]:
    return offload.GivenFrames([page[piece] for page in pages for piece in pieces]).frames()


def _leading(held: Done) -> int:
    return [*held, False].index(False)


def _ends(held: Done, transfer: Any) -> set[int]:
    """The lengths of a prefix that has what a pool needs. Raises ValueError."""
    if transfer.hit_policy == hicache.PoolHitPolicy.ALL_PAGES:
        return {*range(1, _leading(held) + 1)}
    if transfer.hit_policy == hicache.PoolHitPolicy.TRAILING_PAGES:
        last = max(1, len(transfer.keys or ()))
        return {end for end in range(1, len(held) + 1) if all(held[max(0, end - last) : end])}
    raise ValueError(f"the cachesvc tier has no pools of {transfer.hit_policy}")
