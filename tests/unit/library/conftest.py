"""A fake vLLM, a fake daemon, and a client of both."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier import Client
from kvtier.library.flows import pin_flow, prompt_history
from tests.fakes import fake_cache_service
from tests.fakes.fake_cache_service import FakeCacheService
from tests.unit.cli import fake_vllm
from tests.unit.cli.fake_vllm import FakeVllm


@pytest.fixture
def vllm() -> Iterator[FakeVllm]:
    with fake_vllm.serving(FakeVllm()) as fake:
        yield fake


@pytest.fixture
def daemon(tmp_path: Path, vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCacheService]:
    """Serve a daemon with one engine: a completion makes every chunk durable."""
    monkeypatch.setattr(pin_flow, "NO_ENGINE_TIMEOUT_S", 0.0)
    monkeypatch.setattr(prompt_history, "BIND_TIMEOUT_S", 0.0)
    with fake_cache_service.serving(FakeCacheService(), tmp_path / "s") as fake:
        fake.num_engines = 1
        vllm.on_completion = lambda body: fake.capture()
        vllm.cached_tokens = 576
        yield fake


@pytest.fixture
def kvtier(daemon: FakeCacheService, vllm: FakeVllm, tmp_path: Path) -> Iterator[Client]:
    with Client(tmp_path / "s", url=vllm.url) as client:
        yield client
