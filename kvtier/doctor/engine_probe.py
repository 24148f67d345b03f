"""Runs in the environment of vLLM, where kvtier may be missing; prints one JSON line.

Another interpreter runs its text, so it imports nothing of kvtier but what it reports on.
"""

import importlib.metadata
import json
from contextlib import suppress


def probe() -> dict[str, object]:
    """Return the fields of `EngineEnvironment`."""
    facts: dict[str, object] = {"vllm": "", "series": [], "hashes": [], "problem": ""}
    with suppress(importlib.metadata.PackageNotFoundError):
        facts["vllm"] = importlib.metadata.version("vllm")
    try:
        from kvtier.vllm_versions import CRYPTO_HASHES, VLLM_SERIES

        facts |= {"series": VLLM_SERIES, "hashes": sorted(CRYPTO_HASHES)}
        if facts["vllm"]:
            import kvtier_connector.connector  # noqa: F401
    except Exception as exc:
        facts["problem"] = f"{type(exc).__name__}: {exc}"
    return facts


if __name__ == "__main__":
    print(json.dumps(probe()))
