"""The environment that vLLM is started in."""

import os

from tiers.remote.settings import RemoteSettings

_DEFAULTS = {
    # A server with threads must not be forked: a lock that another thread held stays locked.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def prepare_vllm_environment() -> None:
    """Set what vLLM reads at its import; what the user has set stays. Before vLLM is imported."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


def node_environment(remote: RemoteSettings | None) -> dict[str, str]:
    """Of a node that a server starts. The remote tier is told by names and not by arguments, which
    every user of the machine can read, with the password in them."""
    told = {"URL": remote.url, "WRITES": str(remote.writes)} if remote is not None else {"URL": ""}
    if remote is not None and remote.key_file is not None:
        told["KEY_FILE"] = str(remote.key_file)
    return {**os.environ, **{f"CACHESVC_CACHE__REMOTE_{name}": is_ for name, is_ in told.items()}}
