from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.core.arena_format import ArenaGeometry
from tests.fakes.fake_daemon import FakeDaemon


@pytest.fixture
def geometry() -> ArenaGeometry:
    return ArenaGeometry(arena_id=b"A" * 16, num_slots=64, row_bytes=4096, num_ranks=2, rank_bytes=2048)


@pytest.fixture
def daemon(tmp_path: Path, geometry: ArenaGeometry) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(tmp_path, geometry)
    yield fake
    fake.stop()
