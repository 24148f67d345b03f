"""HTTP over a fake daemon and a fake vLLM."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvtier import Client
from tests.fakes.fake_cache_service import FakeCacheService
from tests.unit.cli.fake_vllm import FakeVllm
from tests.unit.library.conftest import daemon as daemon  # fixtures
from tests.unit.library.conftest import kvtier as kvtier
from tests.unit.library.conftest import vllm as vllm
from tests.unit.web.http_rig import served_door


@pytest.fixture
def api(daemon: FakeCacheService, vllm: FakeVllm, kvtier: Client, tmp_path: Path) -> Iterator[httpx.Client]:
    """Ask the API: paths follow /api/v1."""
    with (
        served_door(socket=tmp_path / "s", vllm_url=vllm.url) as server,
        httpx.Client(base_url=f"{server.url}/api/v1", timeout=60) as client,
    ):
        yield client
