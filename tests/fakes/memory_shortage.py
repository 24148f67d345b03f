"""A system that has no memory for a decoder."""

from typing import Any

import pytest
import zstandard

from kvtier.disk.codecs import planes

NO_MEMORY = (MemoryError(), zstandard.ZstdError("zstd decompress error: Allocation error : not enough memory"))
"""What python-zstandard raises where it gets none itself, and where zstd gets none."""


def refuse_memory(monkeypatch: pytest.MonkeyPatch, error: Exception, *, times: int) -> None:
    """Make the first `times` calls of a decoder fail."""
    left, made = [error] * times, zstandard.ZstdDecompressor

    class Decompressor:
        def __init__(self, **how: Any) -> None:
            self._made = made(**how)

        def stream_reader(self, stored: Any) -> Any:
            if left:
                raise left.pop()
            return self._made.stream_reader(stored)

    monkeypatch.setattr(zstandard, "ZstdDecompressor", Decompressor)
    monkeypatch.setattr(planes, "_scratch", planes.ThreadScratch())
