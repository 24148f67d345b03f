"""What of vLLM the connector is written for. Imports nothing, so that `kvtier doctor` can ask any environment."""

VLLM_SERIES = "0.32"
"""Major and minor version: the connector subclasses internals, which change from one to the next."""
CRYPTO_HASHES = frozenset({"sha256", "sha256_cbor"})
"""Block hashes that are the same after a restart; vLLM seeds its others anew unless PYTHONHASHSEED is set."""
