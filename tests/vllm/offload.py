"""vLLM's own offload over a secondary tier, without an engine: real memory, keys and jobs.

A program for vLLM's environment. It reads a command a line as JSON, and answers in a line each.
"""

import hashlib
import json
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm import platforms
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload import config as offloading
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from cachesvc.vllm.connector import CachesvcConnector
from cachesvc.vllm.plugin import register

CHUNK_BYTES = 1 << 20
HOST_CHUNKS = 64
PATIENCE_S = 60


def config(
    model: str, tier: dict[str, Any], dtype: str, tp_size: int
) -> offloading.OffloadingConfig:
    extra = {"cpu_bytes_to_use": HOST_CHUNKS * CHUNK_BYTES, "secondary_tiers": [tier]}
    return offloading.OffloadingConfig(
        groups=(offloading.OffloadingGroupConfig(16, ("layer",), 0),),
        worker_kv_bytes_per_block=CHUNK_BYTES,
        enable_kv_cache_events=True,
        extra_config=extra,
        engine_id=f"test-{os.getpid()}-{time.monotonic_ns()}",
        model=offloading.OffloadingModelConfig(model, dtype),
        cache=offloading.OffloadingCacheConfig(16, 1),
        parallel=offloading.OffloadingParallelConfig(0, 1, tp_size, 1, 1, 1, 0, 1, None, True),
    )


def key_of(number: int) -> Any:
    return base.make_offload_key(hashlib.sha256(number.to_bytes(8, "big")).digest(), 0)


def chunk_of(number: int) -> Any:
    """Numbers in bfloat16 that tell their chunk, and compress as KV does."""
    drawn = np.random.default_rng(number).standard_normal(CHUNK_BYTES // 2, np.float32)
    return (drawn.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


class Offload:
    """One `TieringOffloadingManager`, stepped by hand as vLLM's scheduler does."""

    def __init__(
        self, model: str, tier: dict[str, Any], dtype: str = "bfloat16", tp_size: int = 1
    ) -> None:
        self.manager = TieringOffloadingSpec(config(model, tier, dtype, tp_size)).get_manager()
        view = self.manager.primary_tier.get_kv_memoryview()
        self.rows = np.asarray(view).view(np.uint8)
        self.num_requests = 0
        self.events: list[tuple[bool, int]] = []

    def request(self) -> base.ReqContext:
        self.num_requests += 1
        context = base.ReqContext(f"request-{self.num_requests}")
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        self.manager.on_schedule_end(base.ScheduleEndContext((), ()))
        for event in self.manager.take_events():
            if event.medium is base.Medium.STORAGE:
                self.events.append((event.removed, len(event.keys)))
        time.sleep(0.001)

    def look(self, numbers: range, context: base.ReqContext) -> list[int]:
        """Those of the chunks that are hits, once no answer is pending."""
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            found = {number: self.manager.lookup(key_of(number), context) for number in numbers}
            if not {base.LookupResult.RETRY, base.LookupResult.HIT_PENDING} & {*found.values()}:
                return [number for number in numbers if found[number] is base.LookupResult.HIT]
            self.step()
        raise AssertionError("a lookup has no end")

    def store(self, first: int, count: int, wait: bool = True) -> dict[str, Any]:
        """As chunks that the engine computed; then the host memory is emptied."""
        numbers, context = range(first, first + count), self.request()
        self.look(numbers, context)
        keys = [key_of(number) for number in numbers]
        prepared = self.manager.prepare_store(keys, context)
        for number, row in zip(numbers, prepared.store_spec.block_ids, strict=True):
            self.rows[row] = chunk_of(number)
        began_s = time.perf_counter()
        self.manager.complete_store(keys, context)
        self.manager.on_request_finished(context)
        while wait and self.manager.has_pending_work():
            self.step()
        seconds = time.perf_counter() - began_s
        if wait:
            self.empty()
        return {"seconds": seconds}

    def empty(self) -> None:
        """Empties the host memory, as others who need it do."""
        tiers, self.manager.secondary_tiers = self.manager.secondary_tiers, []
        self.manager.reset_cache()
        self.manager.secondary_tiers = tiers
        self.rows[:] = 0

    def reset(self) -> None:
        """vLLM forgets what is cached, as after its weights were changed in place."""
        self.manager.reset_cache()
        if hasattr(self.manager, "on_reset_flushed"):  # from 0.33 on
            self.manager.on_reset_flushed()

    def load(self, first: int, count: int) -> dict[str, Any]:
        """The chunks that came from the tier, and how many of them have wrong bytes."""
        numbers, context = range(first, first + count), self.request()
        began_s = time.perf_counter()
        hits = self.look(numbers, context)
        seconds = time.perf_counter() - began_s
        keys = [key_of(number) for number in hits]
        sources = sorted({str(self.manager.get_load_source(key, context).value) for key in keys})
        rows = self.manager.prepare_load(keys, context).block_ids if keys else ()
        pairs = zip(hits, rows, strict=True)
        wrong = [number for number, row in pairs if (self.rows[row] != chunk_of(number)).any()]
        self.manager.complete_load(keys, context)
        self.manager.on_request_finished(context)
        self.empty()
        return {"hits": hits, "wrong": wrong, "seconds": seconds, "sources": sources}

    def held(self, first: int, count: int) -> list[int]:
        """What a new request would find, once the tier has written what it wants to."""
        [tier] = self.manager.secondary_tiers
        tier._writer.submit(lambda: None).result()
        numbers = range(first, first + count)
        found = tier.held([key_of(number) for number in numbers])
        return [number for number, is_held in zip(numbers, found, strict=True) if is_held]

    def hang(self) -> dict[str, Any]:
        """How long a lookup waits for a disk that does not answer."""
        [tier] = self.manager.secondary_tiers
        answers = threading.Event()
        tier.held = lambda keys: [answers.wait() for _ in keys]
        began_s = time.perf_counter()
        hits = self.look(range(4), self.request())
        answers.set()
        return {"hits": hits, "seconds": time.perf_counter() - began_s}

    def close(self) -> dict[str, Any]:
        del self.rows
        self.manager.shutdown()
        return {"events": self.events}


def connect(
    model: str, even: bool = True, order: str = "LBHNC", load: str = "auto", **told: Any
) -> dict[str, str]:
    """What the connector says of such an engine in a worker: why it is refused, or its layout."""
    prefixes = told.pop("prefixes", True)
    layer = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
    spec = layer if even else UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": layer})
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["a"])
    config = SimpleNamespace(
        kv_transfer_config=KVTransferConfig(**told),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        cache_config=SimpleNamespace(enable_prefix_caching=prefixes),
        model_config=SimpleNamespace(model=model, revision=None, compute_hash=str, use_mla=False),
        load_config=SimpleNamespace(load_format=load),
        speculative_config=None,
    )
    try:
        kept = SimpleNamespace(kv_cache_groups=[group], kv_cache_layout=order)
        made = CachesvcConnector(config, KVConnectorRole.WORKER, kept)
    except ValueError as error:
        return {"error": str(error)}
    if made._carrier is None:
        return {"error": "nothing is cached"}
    return {"layout": made._carrier._identity.scope.layout.hex()}


def answer(offload: Offload | None, do: str, asked: dict[str, Any]) -> tuple[Offload | None, Any]:
    if do == "connect":
        return offload, connect(**asked)
    if do == "open":
        try:
            return Offload(**asked), {}
        except Exception as error:  # noqa: BLE001 - told to the test
            return None, {"error": f"{type(error).__name__}: {error}"}
    if do == "die":
        assert offload is not None
        offload.store(**asked, wait=False)
        offload.step()
        os.kill(os.getpid(), signal.SIGKILL)
    told = getattr(offload, do)(**asked)
    return (None if do == "close" else offload), told


def main() -> None:
    if not platforms.current_platform.device_type:  # the classes of a build for GPUs, on a CPU
        platforms._current_platform = CpuPlatform()
    register()
    offload: Offload | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        offload, told = answer(offload, asked.pop("do"), asked)
        print("> " + json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
