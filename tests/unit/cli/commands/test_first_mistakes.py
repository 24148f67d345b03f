"""What a newcomer gets wrong with `kvtier pin`: each time what happened, what to do next, and the exit code."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.fake_cache_service import FakeCacheService
from tests.unit.cli import fake_vllm
from tests.unit.cli.conftest import Kvtier
from tests.unit.cli.fake_vllm import FakeVllm, RefusedError

BASE_URL = "must be the base URL of a vLLM server, like http://127.0.0.1:8000"


@pytest.fixture(autouse=True)
def prompt(tmp_path: Path) -> None:
    (tmp_path / "s.txt").write_text("You are a parrot. " * 20)


class NotVllm(FakeVllm):
    """Any other HTTP server: it gives the same answer to everything."""

    def __init__(self, status: int, value: dict[str, Any] | str) -> None:
        super().__init__()
        self.reply = status, value

    def answer(self, path: str, body: dict[str, Any], authorization: str) -> tuple[int, dict[str, Any] | str]:
        return self.reply


@pytest.fixture(
    params=[
        (404, "<!DOCTYPE HTML>\n<html><body><h1>Error response</h1></body></html>"),
        (200, "<html>Welcome</html>"),
        (200, {"data": ["a string"]}),
        (200, {"data": [{"object": "model"}]}),
    ],
    ids=["404 page", "page", "strings for models", "models without id"],
)
def other_server(request: pytest.FixtureRequest) -> Iterator[FakeVllm]:
    with fake_vllm.serving(NotVllm(*request.param)) as fake:
        yield fake


def refused(kvtier: Kvtier, *arguments: object, exit_code: int, says: str) -> None:
    """Run `kvtier pin bot ARGUMENTS` and check what it says on stderr, in one line of words."""
    result = kvtier("pin", "bot", *arguments)
    said = " ".join(result.stderr.split())
    assert says in said
    assert "<html" not in said.lower(), "a page of HTML does not help"
    assert result.exit_code == exit_code, result.output


def test_no_daemon(vllm: FakeVllm, kvtier: Kvtier) -> None:
    says = "(there is no such socket); start `kvtier-daemon`, or pass --socket; `kvtier doctor` says more"
    refused(kvtier, "--system", "s.txt", "--url", vllm.url, exit_code=3, says=says)


def test_a_file_in_the_socket_s_place(kvtier: Kvtier, tmp_path: Path) -> None:
    """It said that the daemon had died."""
    (tmp_path / "s").write_text("")
    refused(kvtier, "--system", "s.txt", exit_code=3, says="(that is not a socket)")


def test_no_server_listens_at_the_url(daemon: FakeCacheService, kvtier: Kvtier) -> None:
    says = "no vLLM answers at http://127.0.0.1:9 (connection refused); start `vllm serve` and wait until it is ready"
    refused(kvtier, "--system", "s.txt", "--url", "http://127.0.0.1:9", exit_code=1, says=says)


def test_the_url_of_an_endpoint(daemon: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier) -> None:
    refused(kvtier, "--system", "s.txt", "--url", f"{vllm.url}/v1/chat/completions", exit_code=1, says=BASE_URL)


def test_another_server_at_the_url(daemon: FakeCacheService, other_server: FakeVllm, kvtier: Kvtier) -> None:
    """It printed the page, or a traceback when the models were none."""
    refused(kvtier, "--system", "s.txt", "--url", other_server.url, exit_code=1, says=BASE_URL)
    assert daemon.pins == []


def test_a_vllm_without_a_model(daemon: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier) -> None:
    vllm.models = []
    refused(kvtier, "--system", "s.txt", "--url", vllm.url, exit_code=2, says="serves no model; is it the right vLLM?")


def test_a_model_that_is_not_served(daemon: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier) -> None:
    says = f"--model = 'gpt': is not served at {vllm.url}; vLLM serves toy"
    refused(kvtier, "--system", "s.txt", "--url", vllm.url, "--model", "gpt", exit_code=2, says=says)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ((), "requires an API key (Unauthorized); pass --api-key, or set VLLM_API_KEY or OPENAI_API_KEY"),
        (("--api-key", "wrong"), "refuses the API key (Unauthorized); correct --api-key, VLLM_API_KEY or"),
    ],
)
def test_api_keys(daemon: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier, option: tuple[str, ...], says: str) -> None:
    """A wrong key was answered as if none had been given."""
    vllm.api_key = "right"
    refused(kvtier, "--system", "s.txt", "--url", vllm.url, *option, exit_code=1, says=says)


def test_a_template_that_takes_no_system_prompt(daemon: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier) -> None:
    def template(messages: list[dict[str, Any]], tools: list[Any]) -> str:
        raise RefusedError("System role not supported")

    vllm.template = template
    says = "vLLM cannot turn this into tokens: System role not supported. Give it as requests send it: --messages FILE"
    refused(kvtier, "--system", "s.txt", "--url", vllm.url, exit_code=1, says=says)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "'file': cannot be read: No such file or directory"),
        (b"", "'file': is empty; there is nothing to pin"),
        (b" \n", "'file': is empty; there is nothing to pin"),
        (b"caf\xe9", "'file': is not UTF-8 text (byte 3); save it as UTF-8"),
        (b"\xef\xbb\xbfYou are", "'file': begins with a byte order mark, which requests do not send"),
    ],
)
def test_files(daemon: FakeCacheService, kvtier: Kvtier, tmp_path: Path, content: bytes | None, says: str) -> None:
    """A byte order mark became part of the prompt, which no request ever matched."""
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    refused(kvtier, "--system", "file", exit_code=2, says=says)


def test_what_vllm_cannot_use_says_how_to_remove_it(daemon: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier) -> None:
    """Too long, too short: the engine says it, the pin stands, and `list` called it waiting."""
    daemon.num_engines, daemon.bind_error = 1, "the prompt has 9000 tokens, max_model_len is 8192; shorten it"
    says = f"vLLM cannot use it: {daemon.bind_error}. To remove it: kvtier unpin bot, then kvtier evict bot"
    refused(kvtier, "--system", "s.txt", "--url", vllm.url, exit_code=1, says=says)
    again = kvtier("pin", "bot", "--system", "s.txt", "--url", vllm.url)
    assert "registered: bot (the pin is saved)" in again.output
    assert "durable" not in again.output, "it was called durable in one line and refused in the next"
    assert "refused" in kvtier("list").output
    shown = " ".join(kvtier("show", "bot").output.split())
    assert f"state refused: vLLM cannot use it: {daemon.bind_error}" in shown
    assert shown.count("9000 tokens") == 1


def test_the_same_name_twice(daemon: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier, tmp_path: Path) -> None:
    daemon.num_engines = 1
    vllm.on_completion = lambda body: daemon.capture()
    (tmp_path / "ids").write_text(json.dumps([*range(99)]))
    assert kvtier("pin", "bot", "--system", "s.txt", "--url", vllm.url).exit_code == 0
    assert kvtier("pin", "bot", "--system", "s.txt", "--url", vllm.url).exit_code == 0, "the same prompt again"
    says = "prompt 'bot' exists and differs in tokens; pass --replace to replace it, or choose another name"
    refused(kvtier, "--tokens", "ids", "--url", vllm.url, exit_code=1, says=says)
    assert kvtier("pin", "bot", "--tokens", "ids", "--url", vllm.url, "--replace").exit_code == 0
