"""The settings of the remote tier, for the embedded engine and for vLLM."""

from cachesvc.config.errors import ConfigError
from cachesvc.config.sections import CacheSection
from tiers.remote.settings import RemoteSettings, RemoteWrites


def remote_settings(cache: CacheSection) -> RemoteSettings | None:
    """The remote tier below the disk, or None. Raises ConfigError where it has no disk above it."""
    if not cache.remote_url:
        return None
    if not cache.disk_bytes:
        raise ConfigError(
            "cache.remote_url needs the disk tier, because its blocks pass through it; set "
            "cache.disk_bytes, or leave cache.remote_url empty"
        )
    writes = RemoteWrites(cache.remote_writes)
    return RemoteSettings(cache.remote_url, writes, cache.remote_key_file)


def check_remote(cache: CacheSection) -> None:
    """Raises ConfigError or ConfigurationError for a remote tier that cannot be opened later."""
    remote = remote_settings(cache)
    if remote is not None:
        remote.check()
