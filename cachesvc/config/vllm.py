"""The environment that vLLM is started in."""

import os

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
