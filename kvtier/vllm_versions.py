"""Which versions of vLLM kvtier supports: the range, the check, and the series that were run.

Connector, doctor and the test of pyproject.toml and docs/compatibility.md take them from here. It imports nothing of
kvtier, because the doctor also reads it in the environment of vLLM.
"""

import re
from collections.abc import Sequence

VLLM_SERIES = ("0.26", "0.33")
"""First and last minor version: the connector subclasses internals, which change from one to the next.

`kvtier_connector.engine.vllm_compat` bridges what differs, as recorded from the wheel of each version
(tests/contract/test_signatures.py).
"""
TESTED_SERIES = ("0.31", "0.32", "0.33")
"""Those of them whose engines were run (`make test-vllm`)."""
TESTED_VERSIONS = f"{', '.join(TESTED_SERIES[:-1])} and {TESTED_SERIES[-1]}"
"""The same, for a message."""
CRYPTO_HASHES = frozenset({"sha256", "sha256_cbor"})
"""Block hashes that are the same after a restart; vLLM seeds its others at random unless PYTHONHASHSEED is set."""


_VERSION = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})(?![0-9])")


def supports(version: str, series: Sequence[str] = VLLM_SERIES) -> bool:
    """Return whether a version of vLLM is of the series, or between the first and the last of them."""
    return _minor(series[0]) <= _minor(version) <= _minor(series[-1])


def is_tested(version: str) -> bool:
    """Return whether a version is of a tested series. Only there does kvtier move vLLM's own blocks."""
    return any(_minor(version) == _minor(series) for series in TESTED_SERIES)


def _minor(version: str) -> tuple[int, ...]:
    """Return major and minor version; of text that is no version nothing, which is before every series."""
    match = _VERSION.match(version)
    return (int(match[1]), int(match[2])) if match else ()
