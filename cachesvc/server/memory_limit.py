"""The limit that control groups set on this process's memory, and what its caches take when full.

The system kills a process that exceeds the limit. Caches take memory as they fill, so that may
happen long after the start.
"""

import logging

from api.format import size
from cachesvc.config.sections import CacheSection
from cachesvc.server.spare_memory import anonymous_bytes
from engine.attention.copies import DEFAULT_BUDGET_BYTES
from engine.cgroups import memory_limit
from engine.hardware import CPU_CACHE_BYTES

logger = logging.getLogger(__name__)


def full_bytes(cache: CacheSection, *, on_gpu: bool) -> int:
    """Bytes of ordinary memory that the caches take when full. On a CPU working copies belong to
    them, as far as they are kept for later prompts."""
    if on_gpu:
        return cache.host_bytes
    return cache.host_bytes + _on_cpu(cache) + DEFAULT_BUDGET_BYTES // 4


def largest_cache(cache: CacheSection, *, on_gpu: bool) -> str:
    """The option of the cache that takes most, and its size."""
    if on_gpu or cache.host_bytes > _on_cpu(cache):
        return f"--host-cache ({size(cache.host_bytes)})"
    return f"--device-cache ({size(_on_cpu(cache))})"


def _on_cpu(cache: CacheSection) -> int:
    return cache.device_bytes or CPU_CACHE_BYTES


def warn_of_limit(cache: CacheSection, *, on_gpu: bool) -> None:
    """Say if the caches will not fit beside what this process has now: its code and weights."""
    limit, needed = memory_limit(), anonymous_bytes() + full_bytes(cache, on_gpu=on_gpu)
    if limit is not None and needed > limit:
        logger.warning(
            f"the memory limit of this process's control group is {size(limit)}, and with full "
            f"caches it needs {size(needed)}: lower {largest_cache(cache, on_gpu=on_gpu)}, or the "
            f"system may end it"
        )
