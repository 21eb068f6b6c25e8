"""The settings of the remote tier, for the embedded engine and for vLLM."""

from cachesvc.config.sections import CacheSection
from tiers.remote.settings import RemoteSettings, RemoteWrites


def remote_settings(cache: CacheSection) -> RemoteSettings | None:
    """The remote tier below the disk, or None."""
    if not cache.remote_url:
        return None
    writes = RemoteWrites(cache.remote_writes)
    return RemoteSettings(cache.remote_url, writes, cache.remote_key_file)
