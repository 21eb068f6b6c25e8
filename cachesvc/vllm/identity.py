"""The identity of KV in a vLLM engine, as scopes and block ids of the tiers.

The scheduler and every worker compute the same identity from the same configuration. It covers the
content of the weights, everything that affects how KV is computed or laid out, and the rank. So
blocks that one rank stores for a group of layers are found by the same rank of another engine for
that group, and by nothing else. Where all ranks have the same, the first one stores it for all.
"""

import contextlib
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import xxhash

from cachesvc.model_files import UnsupportedKv, files_digest, weights_digest
from cachesvc.vllm.groups import KvGroup, groups_of
from tiers.blocks.keys import CacheScope, PrefixKey
from tiers.blocks.layout import BlockLayout

_HEX = "hex:"
_ADAPTER_FILES = ("*.safetensors", "*.bin", "adapter_config.json")


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """The blocks of an engine: of each group of layers, on each rank."""

    scope: CacheScope
    groups: tuple[KvGroup, ...]
    num_ranks: int

    @property
    def layout(self) -> BlockLayout:
        """The layout of the blocks in which prefixes are counted."""
        return self.groups[0].layout

    @property
    def is_plain(self) -> bool:
        """Whether vLLM can compute the end of a prefix whose load fell short. Else it begins the
        request anew."""
        return len(self.groups) == 1 and self.groups[0].is_whole

    def roots_of(self, request: Any) -> list[list[PrefixKey]]:
        """For each group, the root of a vLLM request's blocks on each rank.

        It also depends on the tenant's salt and the adapter's content.
        """
        scope = self.scope
        if request.cache_salt:
            scope = replace(scope, tenant=tenant_of(request.cache_salt))
        if request.lora_request is not None:
            scope = replace(scope, adapter=adapter_of(request.lora_request) or os.urandom(16))
        return roots_of(scope.root(), self.groups, self.num_ranks)


def roots_of(root: PrefixKey, groups: Sequence[KvGroup], num_ranks: int) -> list[list[PrefixKey]]:
    """Of a scope's blocks: for each group, on each rank, or on one where all have the same."""
    each = zip(groups, _parts(root, "group", len(groups)), strict=True)
    return [_parts(first, "rank", 1 if group.is_shared else num_ranks) for group, first in each]


def _parts(root: PrefixKey, kind: str, count: int) -> list[PrefixKey]:
    """The roots of a scope's groups, or of a group's ranks. The first one's is `root` itself."""
    names = (f"cachesvc.vllm.{kind} {number}".encode() for number in range(1, count))
    return [root, *(PrefixKey(xxhash.xxh3_128_digest(root + name)) for name in names)]


def adapter_digest(path: str, read: object = None) -> bytes:
    """The digest of an adapter folder's contents, once for each `read`. Raises Unsupported if it
    holds no adapter."""
    return files_digest(path, _ADAPTER_FILES, read)


def adapter_of(lora: Any) -> bytes | None:
    """The content of an adapter of vLLM's, which reads it once for each id, and with `load_inplace`
    at each use. None if its files are not here, as of a name in the hub, or of tensors."""
    path, read = Path(lora.lora_path).expanduser(), lora.lora_int_id
    try:
        if getattr(lora, "load_inplace", False):
            facts = ((file.name, file.stat()) for file in path.iterdir())
            read = read, sorted((name, its.st_size, its.st_mtime_ns) for name, its in facts)
        return adapter_digest(str(path), repr(read))
    except (OSError, UnsupportedKv):
        return None


def tenant_of(salt: str) -> bytes:
    """The tenant's salt in a vLLM `cache_salt` of our server. Any other salt is used as it is."""
    with contextlib.suppress(ValueError):
        if salt.startswith(_HEX):
            return bytes.fromhex(salt.removeprefix(_HEX))
    return salt.encode()


def identity_of(config: Any, kv_cache: Any) -> EngineIdentity:
    """The identity of an engine with this `VllmConfig` and `KVCacheConfig`. Raises Unsupported."""
    groups, model = groups_of(config, kv_cache), config.model_config
    scope = CacheScope(
        weights=weights_digest(model.model, model.revision) + model.compute_hash().encode(),
        layout=_described(config, kv_cache, groups),
    )
    return EngineIdentity(scope, groups, config.parallel_config.tensor_parallel_size)


def check_parallel(parallel: Any) -> None:
    """Raises ValueError for parallelism in which ranks share neither layers nor blocks. Replicas of
    the engine (`data_parallel_size`) are engines of their own."""
    for field, why in (
        ("pipeline_parallel_size", "each rank would keep other layers"),
        ("decode_context_parallel_size", "a block would be spread over several ranks"),
        ("prefill_context_parallel_size", "a block would be spread over several ranks"),
    ):
        if (size := getattr(parallel, field, 1)) > 1:
            raise ValueError(
                f"cachesvc does not serve {field}={size}: {why}. Use tensor_parallel_size or "
                "data_parallel_size, or start vLLM without this connector"
            )


def contents_of(features: Sequence[Any], num_blocks: int, block_size: int) -> list[bytes]:
    """What each block covers besides tokens: the digests of images and similar contents in it."""
    if not features:
        return []
    contents = [b""] * num_blocks
    for feature in features:
        start, length = feature.mm_position.offset, feature.mm_position.length
        first, last = start // block_size, (start + length - 1) // block_size
        for number in range(first, min(last + 1, num_blocks)):
            place = start - number * block_size
            text = f"{feature.modality}:{feature.identifier}:{place}:{length}"
            contents[number] += xxhash.xxh3_128_digest(text.encode())
    return contents


def _described(config: Any, kv_cache: Any, groups: Sequence[KvGroup]) -> bytes:
    """Everything about this engine that affects the position of a number in a block."""
    import vllm

    attention = getattr(config, "attention_config", None)
    facts = (
        f"vllm {vllm.__version__}",
        *(repr(kv_cache.kv_cache_groups[group.number].kv_cache_spec) for group in groups),
        *([repr([group.layers for group in groups])] if groups[1:] else []),
        f"tensor parallel {config.parallel_config.tensor_parallel_size}",
        f"order {kv_cache.kv_cache_layout}",
        f"load {config.load_config.load_format == 'dummy'}",
        f"backend {getattr(attention, 'backend', None)}",
        f"device {device_name()}",
    )
    return b"vllm:" + xxhash.xxh3_128_digest("\n".join(facts).encode())


def device_name() -> str:
    """The kind of device. On a CPU it includes the instruction set, which determines how K is
    packed."""
    from vllm.platforms import current_platform

    name = f"{current_platform.device_type} {current_platform.get_device_name()}"
    if current_platform.device_type == "cpu":
        return f"{name} {platform.machine()} {_cpu_flags()}"
    return name


@lru_cache(maxsize=1)
def _cpu_flags() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    lines = (line for line in text.splitlines() if line.startswith(("flags", "Features")))
    return " ".join(sorted(next(lines, "").partition(":")[2].split()))
