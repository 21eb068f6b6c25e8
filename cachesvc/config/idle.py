"""Settings that were given and that the chosen engine does not read."""

from collections.abc import Iterator, Mapping

from cachesvc.config.settings import Settings

# What belongs to blocks and arithmetic is the engine's; a node has what it is started with.
_OF_TIERS = ("block_size", "write_policy", "idle_ttl")
_OF_NODE = ("host_bytes", "disk_bytes", "disk_reserve_bytes", "quotas")
_OF_REMOTE = ("remote_url", "remote_writes", "remote_key_file")
_UNREAD: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "embedded": {"engine": ("key", "vllm", "node", "max_time")},
    "vllm": {
        "model": ("device", "kv_dtype"),
        "cache": _OF_TIERS,
        "engine": ("key", "chunk_tokens"),
    },
    "url": {
        "model": ("device", "dtype", "kv_dtype"),
        "cache": (*_OF_TIERS, "weigh_loads", "device_bytes", *_OF_NODE, *_OF_REMOTE),
        "engine": ("node", "max_running", "chunk_tokens"),
        "events": ("zmq",),
    },
}


def idle_settings(settings: Settings) -> Iterator[str]:
    """The names of settings that somebody gave and that have no effect with this engine."""
    kind = "url" if settings.engine.urls else str(settings.engine.backend)
    for section, names in _UNREAD.get(kind, {}).items():
        given = getattr(settings, section).model_fields_set
        yield from (f"{section}.{name}" for name in names if name in given)
