"""The environment in which vLLM starts."""

import os

from tiers.remote.settings import RemoteSettings

_DEFAULTS = {
    # A process with threads must not fork: a lock held by another thread would stay locked.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def prepare_vllm_environment(*, exact: bool) -> None:
    """Sets variables that vLLM reads at import, unless the user set them. Call before importing
    vLLM. `exact` chooses its kernels that do not depend on the number of rows."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    if exact:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"


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
