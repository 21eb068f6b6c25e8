"""A KV connector that puts the tiers under vLLM; set `kv_connector_module_path: cachesvc.vllm`.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "CachesvcConnector",
        "kv_connector_module_path": "cachesvc.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"node": "/run/cachesvc/node.sock"}}'

The blocks are in a `cachesvc node`. Only this folder knows vLLM; nothing else here imports it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cachesvc.vllm.connector import CachesvcConnector

__all__ = ["CachesvcConnector"]


def __getattr__(name: str) -> Any:
    if name != "CachesvcConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cachesvc.vllm.connector import CachesvcConnector

    return CachesvcConnector
