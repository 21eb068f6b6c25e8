"""Caches of so many blocks, for tests of what they hold."""

from typing import Any

from tiers.blocks.layout import BlockLayout
from tiers.cache import CacheSettings, TieredCache

_PARTS = ("disk", "mover", "pin_folder", "wall_clock", "shares")


def cache_of(layout: BlockLayout, device: int, host: int = 0, **more: Any) -> TieredCache:
    """Blocks of this layout on the device and the host. What else is given is a part of the cache
    or one of its settings. Loads are not weighed against computing."""
    parts = {name: more.pop(name) for name in _PARTS if name in more}
    more |= {"device_bytes": device * layout.nbytes, "host_bytes": host * layout.nbytes}
    return TieredCache(layout, CacheSettings(**{"weigh_loads": False, **more}), **parts)
