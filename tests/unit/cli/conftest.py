"""A fake vLLM, a fake daemon, and `kvtier` between them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvtier.cli.app import app
from kvtier.library.flows import pin_flow
from tests.fakes import fake_cache_service
from tests.fakes.fake_cache_service import FakeCacheService
from tests.unit.cli import fake_vllm
from tests.unit.cli.fake_vllm import FakeVllm

Kvtier = Callable[..., Result]


@pytest.fixture
def vllm() -> Iterator[FakeVllm]:
    with fake_vllm.serving(FakeVllm()) as fake:
        yield fake


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeCacheService]:
    with fake_cache_service.serving(FakeCacheService(), tmp_path / "s") as fake:
        yield fake


@pytest.fixture
def kvtier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kvtier:
    """Run the CLI against tmp_path/s, in tmp_path, 80 columns wide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVTIER_SOCKET", str(tmp_path / "s"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(pin_flow, "NO_ENGINE_TIMEOUT_S", 0.0)
    for name in ("VLLM_API_KEY", "OPENAI_API_KEY", "KVTIER_VLLM_URL"):
        monkeypatch.delenv(name, raising=False)
    runner = CliRunner()
    return lambda *arguments, stdin=None: runner.invoke(app, [str(a) for a in arguments], input=stdin)
