"""The environments in which vLLM and a node start."""

import os

from tiers.remote.settings import RemoteSettings

_DEFAULTS = {
    # A process with threads must not fork: a lock held by another thread would stay locked.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "PYTHONWARNINGS": "ignore",  # those of its imports, in our log
    # Its route that empties the prefix cache. Only this user reaches its socket.
    "VLLM_SERVER_DEV_MODE": "1",
}


def vllm_environment(*, exact: bool) -> dict[str, str]:
    """Ours, with what vLLM reads unless the user set it. `exact` chooses its kernels that do not
    depend on the number of rows."""
    return _DEFAULTS | os.environ | ({"VLLM_BATCH_INVARIANT": "1"} if exact else {})


def node_environment(remote: RemoteSettings | None) -> dict[str, str]:
    """The environment of a node that a server starts.

    It carries the remote tier's settings, because arguments, including a password, are visible to
    every user of the machine.
    """
    variables = (
        {"URL": remote.url, "WRITES": str(remote.writes)} if remote is not None else {"URL": ""}
    )
    if remote is not None and remote.key_file is not None:
        variables["KEY_FILE"] = str(remote.key_file)
    return {
        **os.environ,
        **{f"CACHESVC_CACHE__REMOTE_{name}": is_ for name, is_ in variables.items()},
    }
