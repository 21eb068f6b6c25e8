"""The memory that a process may have, and what its caches take when full.

The system kills a process that exceeds the limit of its control groups, or what the machine has.
Caches take memory as they fill, so that may happen long after the start.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from api.format import size
from cachesvc.config.sections import CacheSection
from cachesvc.server.spare_memory import anonymous_bytes, total_bytes
from engine.cgroups import memory_limit
from engine.hardware import CPU_CACHE_BYTES, CPU_COPIES_BYTES

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FullCaches:
    """Bytes of ordinary memory that caches take when full, by the option that sets each, and those
    of working copies that are kept for later prompts."""

    by_option: Mapping[str, int]
    copies_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(self.by_option.values()) + self.copies_bytes

    @property
    def largest(self) -> str:
        """The option of the cache that takes most, and its size."""
        option, num_bytes = max(self.by_option.items(), key=lambda each: each[1])
        return f"{option} ({size(num_bytes)})"


def of_server(cache: CacheSection, *, on_gpu: bool) -> FullCaches:
    if on_gpu:
        return of_node(cache.host_bytes)
    return FullCaches(_on_cpu(cache, cache.host_bytes), CPU_COPIES_BYTES // 4)


def of_vllm(cache: CacheSection, node_bytes: int, *, on_gpu: bool) -> FullCaches:
    """Those of a server with vLLM. Of the node's memory, a control group pays for what its engine
    writes, which may be all."""
    return of_node(node_bytes) if on_gpu else FullCaches(_on_cpu(cache, node_bytes))


def of_node(host_bytes: int) -> FullCaches:
    return FullCaches({"--host-cache": host_bytes})


def _on_cpu(cache: CacheSection, host_bytes: int) -> Mapping[str, int]:
    return {"--device-cache": cache.device_bytes or CPU_CACHE_BYTES, "--host-cache": host_bytes}


def warn_of_limit(caches: FullCaches) -> None:
    """Say if they will not fit beside what this process has now: its code and weights."""
    limit, total = memory_limit(), total_bytes()
    needed = anonymous_bytes() + caches.num_bytes
    lowest = min((each for each in (limit, total) if each is not None), default=needed)
    if needed > lowest:
        whose = "limit of this process's control group" if lowest == limit else "of this machine"
        logger.warning(
            f"the memory {whose} is {size(lowest)}, and with full caches the process needs "
            f"{size(needed)}: lower {caches.largest}, or the system may end it"
        )
