"""What tests of the shipped settings share."""

import pytest

from kvtier.config import resolve


@pytest.fixture
def large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Explicit sizes are compared with the file system, here that of the machine that runs the tests."""
    monkeypatch.setattr(resolve, "filesystem_bytes", lambda folder: 1 << 45)
