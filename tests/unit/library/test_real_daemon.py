"""`kvtier.Client` with a daemon in a process of its own, which restarts."""

from contextlib import closing
from io import BytesIO
from pathlib import Path

import pytest

from kvtier import Client, PromptState, RemoteError
from kvtier.cli.app import app
from kvtier.errors import DaemonUnreachableError, InvalidArgumentError, PromptNotFoundError, PromptUnrenderedError
from kvtier.sealing.sealed_stream import MAGIC
from tests.fakes import tcp_daemon
from tests.fakes.daemon_process import daemon_command, daemon_process
from tests.fakes.scripted_engine import config_in
from tests.unit.cli import fake_vllm
from tests.unit.cli.fake_vllm import FakeVllm

UNUSED_URL = "http://127.0.0.1:9"


def test_a_client_outlives_a_restart(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    command = daemon_command(config)
    with Client(config.server.socket, url=UNUSED_URL) as client:
        with pytest.raises(
            DaemonUnreachableError, match=r"there is no such socket\); start `kvtier-daemon`, or pass socket"
        ):
            client.status()
        with daemon_process(command, tmp_path / "log"):
            pinned = client.pin("bot", tokens=range(80), ttl_s=3600, public=True)
            assert (pinned.state, pinned.num_tokens, pinned.public) == (PromptState.WAITING, 80, True)
            assert client.pin("source", system="You are a parrot.").state is PromptState.UNRENDERED
            with pytest.raises(PromptUnrenderedError, match="'source' is not turned into tokens yet"):
                client.tokens("source")
            watch = client.watch("bot")
            assert next(watch).pin_id == pinned.pin_id
        with closing(watch), pytest.raises(DaemonUnreachableError):
            next(watch)
        with daemon_process(command, tmp_path / "log"):
            assert [prompt.name for prompt in client.list()] == ["bot", "source"]
            assert client.tokens("bot") == tuple(range(80))
            assert client.get("source").recipe["content"] == "You are a parrot."
            assert client.status().num_pinned == 2
            assert client.advise().mode
            assert client.fsck().findings == ()
            client.unpin("bot")
            client.evict("bot")
            with pytest.raises(PromptNotFoundError):
                client.set("bot", priority=1)


def test_a_set_beyond_a_quota_is_refused_as_a_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_in(tmp_path)
    (tmp_path / "kvtier.toml").write_text("[owners]\nteam = { pins = 2 }\n")
    command = [*daemon_command(config), "--config", str(tmp_path / "kvtier.toml")]
    entries = "".join(f"- {{name: p{number}, text: Hello parrot {number}, owner: team}}\n" for number in range(3))
    (tmp_path / "prompts.yaml").write_text(f"prompts:\n{entries}")
    with daemon_process(command, tmp_path / "log"), Client(config.server.socket) as client:
        kvtier = ["--socket", str(config.server.socket), "apply", "-f", str(tmp_path / "prompts.yaml")]
        with pytest.raises(SystemExit) as ended:
            app([*kvtier, "--url", UNUSED_URL])
        assert ended.value.code == 1
        said = capsys.readouterr().err
        assert "error: owner 'team' has 0 of 2 pins, and this adds 3; unpin a prompt of it" in said
        assert "error: nothing was applied: the daemon refuses all of it" in said
        assert client.list() == []


def test_a_pin_of_an_adapter_stays_one_when_vllm_is_away(tmp_path: Path) -> None:
    """Another priority in the file made it a pin of a model with the adapter's name."""
    path = tmp_path / "prompts.yaml"

    def write(how: str) -> str:
        path.write_text(f"prompts: [{{name: t, tokens: {list(range(80))}, model: adapter{how}}}]")
        return str(path)

    with tcp_daemon.serving(tmp_path) as daemon, fake_vllm.serving(FakeVllm()) as vllm:
        vllm.models.append({"id": "adapter", "root": "/adapters/a", "parent": "toy"})
        socket = daemon.config.server.socket
        with Client(socket, url=vllm.url) as client:
            client.apply(write(""), warm=False)
            pinned = client.get("t")
            assert (pinned.model, pinned.lora_name) == ("toy", "adapter")
        with Client(socket, url=UNUSED_URL) as client:
            client.apply(write(", priority: 5"))
            (changed,) = client.list()
            assert (changed.pin_id, changed.lora_name, changed.priority) == (pinned.pin_id, "adapter", 5)
            assert not client.apply(write(", priority: 5")).changed


def test_token_ids_of_an_adapter_are_pinned_for_it_once_vllm_answers(tmp_path: Path) -> None:
    """Pinned before vLLM ran, they were for a model of the adapter's name, which no engine has, for good."""
    path = tmp_path / "prompts.yaml"
    path.write_text(f"prompts: [{{name: t, tokens: {list(range(80))}, model: adapter}}]")
    with tcp_daemon.serving(tmp_path) as daemon, fake_vllm.serving(FakeVllm()) as vllm:
        vllm.models.append({"id": "adapter", "root": "/adapters/a", "parent": "toy"})
        socket = daemon.config.server.socket
        with Client(socket, url=UNUSED_URL) as client:
            client.apply(str(path))
            assert not client.apply(str(path)).changed
        with Client(socket, url=vllm.url) as client:
            assert client.apply(str(path), warm=False).changed
            (pinned,) = client.list()
            assert (pinned.name, pinned.model, pinned.lora_name) == ("t", "toy", "adapter")
            assert not client.apply(str(path), warm=False).changed


def test_a_bundle_that_fails_while_it_is_read_ends_its_import_with_its_own_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was `Exception iterating requests!` of gRPC, which logged a traceback beside it."""

    class Unreadable(BytesIO):
        def read(self, _: int | None = -1) -> bytes:
            raise OSError(5, "Input/output error")

    config = config_in(tmp_path)
    with daemon_process(daemon_command(config), tmp_path / "log"), Client(config.server.socket) as client:
        with pytest.raises(InvalidArgumentError, match=r"^file = .*: is sealed; pass key_file with its key"):
            client.import_bundle(BytesIO(MAGIC + b"..."))
        with pytest.raises(OSError, match="Input/output error"):
            client.import_bundle(Unreadable())
        with pytest.raises(RemoteError, match="cut short"):
            client.import_bundle(BytesIO(b""))
        assert client.list() == []
    assert caplog.text == ""
    assert "Traceback" not in (tmp_path / "log").read_text()
