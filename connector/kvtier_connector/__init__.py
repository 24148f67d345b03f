"""kvtier's side inside vLLM. Importing it costs nothing; the connector class loads on first use."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier_connector.connector import KVTierConnector

__all__ = ["KVTierConnector"]


def __getattr__(name: str) -> Any:
    """Load the connector when vLLM asks for it (`kv_connector_module_path="kvtier_connector"`)."""
    if name == "KVTierConnector":
        from kvtier_connector.connector import KVTierConnector

        return KVTierConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
