"""What vLLM finds by itself where cachesvc is installed: its plugins' entry point."""


def register() -> None:
    """Names the connector and the secondary tier, so that a configuration needs no module path.

    Each vLLM process calls it at its start. It imports nothing of ours.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    name = "CachesvcConnector"
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, "cachesvc.vllm.connector", name)
    if "cachesvc" not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier("cachesvc", "cachesvc.vllm.secondary", "CachesvcTier")
