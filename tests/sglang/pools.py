"""SGLang's host pools, storage configuration and controller on a CPU: its classes, real memory.

`python -m tests.sglang.pools CLASSES MODEL FOLDER` stores pages until it is killed.
"""

import itertools
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

if __name__ == "__main__":
    sys.path.append(sys.argv[1])

import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache import device_pool_info as infos
from sglang.srt.mem_cache import hicache_storage as types
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool as LogicalHostPool
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.runtime_context import get_context, get_parallel

LAYERS, HEADS, DIM, PAGE = 4, 4, 64, 64  # pages of 128 KiB for keys, and as much for values
NUM_PAGES = 64
BUDGET = 1 << 30  # of a pool; by itself, SGLang leaves 10 GiB of a machine alone
PLACED = {"host_to_device_ratio": 0.0, "host_size": 0, "page_size": PAGE, "pin_memory": False}
WHERE = {"device_capacity_tokens": 0, "start_layer": 0, "end_layer": LAYERS}


def serves(model, revision=None, weights="default", **more):
    """Says which model this process serves, as a scheduler's start does, and of which version its
    weights are by now."""
    told = SimpleNamespace(model_path=str(model), revision=revision, weight_version="default")
    vars(told).update(more)
    get_context()._server_args = told
    get_context()._config_bags = {"serving": SimpleNamespace(weight_version=weights)}


@host_memory_budget_scope(BUDGET)
def mha(layout="page_first", dtype=torch.bfloat16, num_pages=NUM_PAGES, layers=LAYERS):
    rows = tuple(torch.zeros(PAGE, HEADS, DIM, dtype=dtype) for _ in range(layers))
    there = torch.tensor([each.data_ptr() for each in rows], dtype=torch.uint64)
    nhd = infos.KVBufferLayout.NHD
    both = infos.KVBuffers(k=rows, v=rows, k_data_ptrs=there, v_data_ptrs=there, layout=nhd)
    heads = {"head_num": HEADS, "head_dim": DIM, "v_head_dim": DIM, "page_size": PAGE}
    info = infos.MHABufferInfo(buffers=both, dtype=dtype, device=torch.device("cpu"), **heads)
    room = {"host_token_capacity": num_pages * PAGE}
    return MHATokenToKVPoolHost(info, layout=layout, **room, **PLACED, **WHERE)


@host_memory_budget_scope(BUDGET)
def mla(layout="page_first", num_pages=NUM_PAGES):
    rows = tuple(torch.zeros(PAGE, 1, 576, dtype=torch.bfloat16) for _ in range(LAYERS))
    there = torch.tensor([each.data_ptr() for each in rows], dtype=torch.uint64)
    where = {"layer_indices": tuple(range(LAYERS)), "device_layer_num": LAYERS}
    widths = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "kv_cache_dim": 576, "page_size": PAGE}
    kind = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
    info = infos.MLABufferInfo(buffers=rows, data_ptrs=there, **where, **widths, **kind)
    room = {"host_token_capacity": num_pages * PAGE, "target_layer_num": LAYERS}
    return MLATokenToKVPoolHost(info, layout=layout, **room, **PLACED, **WHERE)


@host_memory_budget_scope(BUDGET)
def indexer(anchor):
    """The sparse attention's index of a pool of latents: a page of it for each of theirs."""
    device = DSATokenToKVPool.__new__(DSATokenToKVPool)
    rows = [torch.zeros(1, PAGE * 132, dtype=torch.uint8) for _ in range(LAYERS)]
    vars(device).update(
        {"index_head_dim": 128, "quant_block_size": 128, "page_size": PAGE, "device": "cpu"},
        index_page_size=PAGE,
        skip_topk_layers=[False] * LAYERS,
        store_dtype=torch.bfloat16,
        start_layer=0,
        end_layer=LAYERS,
        layer_num=LAYERS,
        layer_shard_enabled=False,
        index_key_cache=SimpleNamespace(buffer=rows),
    )
    return DSAIndexerPoolHost(make_dsa_indexer_pool_decl(device), anchor, pin_memory=False)


@host_memory_budget_scope(BUDGET)
def mamba():
    temporal = torch.zeros(LAYERS, 1, 4, 32, 16, dtype=torch.float32)
    conv = torch.zeros(LAYERS, 1, 96, 3, dtype=torch.bfloat16)
    info = infos.MambaStateBufferInfo(temporal=temporal, conv=(conv,))
    room = {"device_capacity": 1, "pin_memory": False, "layout": "page_first"}
    return MambaPoolHost(info, float(NUM_PAGES), 0, **room)


def filled(pool, count, seed=0):
    """Writes `count` pages that compress as KV does, and returns them."""
    drawn = torch.Generator().manual_seed(seed)
    for at in range(0, count * pool.page_size, pool.page_size):
        page = pool.get_dummy_flat_data_page()
        numbers = torch.randn(page.shape, generator=drawn)
        pool.set_from_flat_data_page(at, (numbers * 40).abs().to(page.dtype))
    return pages_of(pool, count)


def pages_of(pool, count):
    starts = range(0, count * pool.page_size, pool.page_size)
    return [bytes(pool.get_data_page(at).contiguous().view(torch.uint8).numpy()) for at in starts]


def wiped(pool, count):
    for at in range(0, count * pool.page_size, pool.page_size):
        pool.set_from_flat_data_page(at, torch.zeros_like(pool.get_dummy_flat_data_page()))


def config(extra=None, *, rank=0, ranks=1, latents=False, **more):
    told = {"is_mla_model": latents, "tp_rank": rank, "tp_size": ranks, "model_name": "served"}
    alone = {"pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    kept = {"enable_storage_metrics": True, "is_page_first_layout": True}
    return types.HiCacheStorageConfig(extra_config=extra or {}, **told, **alone, **kept, **more)


def options(folder, num_bytes="256MiB", **more):
    named = {"module_path": "cachesvc.sglang.storage", "class_name": "CachesvcStorage"}
    told = {"backend_name": "cachesvc", "dir": str(folder), "bytes": num_bytes}
    return {**named, **told, **more}


def opened(backend, told, pools):
    """A storage backend made, and told of pools, as SGLang's controller does. KV comes first."""
    storage = StorageBackendFactory.create_backend(backend, told, next(iter(pools.values())))
    storage.register_mem_pool_host(next(iter(pools.values())))
    for name, pool in pools.items():
        storage.register_mem_host_pool_v2(pool, name)
    storage.on_host_pools_registered()
    return storage


@contextmanager
def controller(backend, extra, pool):
    """SGLang's controller over a host pool, with its threads. Its device has no memory."""
    device = MLATokenToKVPool.__new__(MLATokenToKVPool)
    if isinstance(pool, MHATokenToKVPoolHost):
        device = SimpleNamespace()
    for name, value in {"device": "cpu", "layer_num": LAYERS}.items():
        setattr(device, name, value)
    device.register_layer_transfer_counter = lambda counter: None
    allocator = SimpleNamespace(get_kvcache=lambda: device)
    told = {"storage_backend": backend, "storage_backend_extra_config": extra}
    alone = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1}
    with get_parallel().override(**alone, attn_dcp_size=1, attn_dcp_rank=0):
        event = threading.Event()
        made = HiCacheController(allocator, pool, PAGE, None, event, model_name="served", **told)
        try:
            yield made
        finally:
            made.detach_storage_backend()


def main(model, folder):
    serves(model)
    pool = mha(num_pages=4)
    storage = opened("dynamic", config(options(folder)), {types.PoolName.KV: pool})
    for first in itertools.count(0, 4):
        filled(pool, 4, first)
        keys = [f"page-{first + number}" for number in range(4)]
        assert all(storage.batch_set_v1(keys, torch.arange(4 * PAGE)))
        print(first + 4, flush=True)


if __name__ == "__main__":
    main(*sys.argv[2:])
