"""Which versions of vLLM the connector supports, and which was run.

Importing it imports nothing else, so that `kvtier doctor` can read it in any environment.
"""

VLLM_SERIES = ("0.26", "0.33")
"""First and last major and minor version: the connector subclasses internals, which change from one to the next.

What differs is in `engine/vllm_compat.py`, by the names that each version's wheel has
(tests/contract/test_signatures.py). Only 0.32 was run.
"""
TESTED_SERIES = "0.32"
"""The only one of them that was run."""
CRYPTO_HASHES = frozenset({"sha256", "sha256_cbor"})
"""Block hashes that are the same after a restart; vLLM seeds its others at random unless PYTHONHASHSEED is set."""


def vllm_is_tested() -> bool:
    """Return whether this vLLM is of the tested series. Only there does kvtier move vLLM's own blocks."""
    import vllm

    return str(vllm.__version__).startswith(f"{TESTED_SERIES}.")
