"""Tests with LMCache itself, in its own environment beside this one (`make peers-venv`)."""

import pytest

from benchmarks.systems.system import PEER_VENVS


@pytest.fixture(autouse=True)
def _needs_lmcache() -> None:
    if not (PEER_VENVS / "lmcache" / "bin" / "python").exists():
        pytest.skip("LMCache is not installed: make peers-venv")
