"""docs/python.md: its examples run, and it names every method. And what the package exports."""

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvtier
from kvtier import Client
from kvtier.client.address import SOCKET_VARIABLE
from kvtier.library.connection import URL_VARIABLE
from tests.fakes.fake_cache_service import FakeCacheService
from tests.unit.cli.fake_vllm import FakeVllm

PAGE = Path(__file__).parents[3] / "docs" / "python.md"


@pytest.mark.usefixtures("daemon")
def test_the_examples_run(vllm: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SOCKET_VARIABLE, str(tmp_path / "s"))
    monkeypatch.setenv(URL_VARIABLE, vllm.url)
    monkeypatch.chdir(tmp_path)  # they write files
    blocks = re.findall(r"^```pycon\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) > 5
    said: list[str] = []
    example = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, PAGE.name, str(PAGE), 0)
    doctest.DocTestRunner().run(example, out=said.append, clear_globs=False)
    example.globs["client"].close()
    assert not said, "".join(said)


def test_every_method_is_named() -> None:
    methods = [name for name in dir(Client) if not name.startswith("_")]
    assert len(methods) > 15
    assert [name for name in methods if f"`{name}(" not in PAGE.read_text()] == []


def test_what_the_package_exports() -> None:
    """A promise: a name may be added here, and none goes away."""
    assert kvtier.__all__ == [
        "Advice", "AdvisedPrefix", "AppliedSet", "AsyncClient", "Binding", "CaptureOutcome", "Change", "ChangeKind",
        "ChangeLooksLike", "ChangingPlace", "Client", "Comparison", "ComparisonVerdict", "CreatedGrant", "DaemonStatus",
        "DeclaredError", "DeclaredErrors", "Difference", "EngineStatus", "Event", "Evicted", "Explained", "Explanation",
        "FsckFinding", "FsckReport", "Grant", "KeyUsage", "KvtierError", "Namespace", "NamespaceAdvice", "NearBinding",
        "NearPrompt", "OutcomeCount", "PinUsage", "PinUse", "Progress", "Prompt", "PromptState", "Readiness",
        "RecentRequest", "RefusedPrompt", "RefusedSharedPin", "RemoteError", "RemoteHost", "RemoteSpending",
        "RemoteStatus", "RequestOutcome", "Tier", "Verdict", "VerifiedNamespace", "VerifiedTier", "VerifyReport",
        "VerifyResult", "WaitingPrompt", "WarmResult", "Warmed", "__version__",
    ]  # fmt: skip
    assert all(getattr(kvtier, name) is not None for name in kvtier.__all__)
    assert dir(kvtier) == sorted(kvtier.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Klient'"):
        kvtier.Klient  # noqa: B018


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("kvtier", ["grpc", "httpx", "google.protobuf", "asyncio"]),
        ("kvtier.library.rendering.render", ["grpc", "typer", "numpy"]),
        ("kvtier.library.rendering.recipe", ["grpc", "typer", "numpy"]),
        ("kvtier.library.async_client", ["typer", "numpy", "httpx", "pydantic", "yaml"]),
        ("kvtier.cli.app", ["numpy", "httpx", "pydantic", "yaml"]),
    ],
)
def test_what_an_import_does_not_load(module: str, heavy: list[str]) -> None:
    """Daemon and connector import the package; the connector renders prompts, and needs no gRPC for it.

    A command that asks only the daemon begins in half the time without the rest.
    """
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_fake_is_a_daemon_with_an_engine(daemon: FakeCacheService, kvtier: Client) -> None:
    """The examples say durable."""
    assert daemon.num_engines == 1
    assert kvtier.status().num_prompts == 0
