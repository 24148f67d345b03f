"""vLLM's plugin hook: makes `"kv_connector": "KVTierConnector"` work without a module path."""

CONNECTOR_NAME = "KVTierConnector"


def register() -> None:
    """Register the connector by name. Runs in every vLLM process, some of them more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, "kvtier_connector.connector", CONNECTOR_NAME)
