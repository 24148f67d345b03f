"""`kvtier.Client` against fakes: values in, values out, events, errors, and what is tried again."""

import io
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvtier import Client, Prompt, PromptState, RemoteError
from kvtier.client.admin import AdminClient
from kvtier.client.remote_errors import remote_error
from kvtier.errors import (
    ConnectionLostError,
    DaemonSilentError,
    DaemonUnreachableError,
    InvalidArgumentError,
    PromptExistsError,
    PromptNotFoundError,
    PromptPinnedError,
    QuotaExceededError,
    RenderError,
)
from kvtier.library import progress_events as events
from tests.fakes import fake_cache_service
from tests.fakes.fake_cache_service import FakeCacheService
from tests.unit.cli.fake_vllm import FakeVllm

SYSTEM = "You are a parrot. " * 20
UNUSED_URL = "http://127.0.0.1:9"


def test_pin_reports_each_step(kvtier: Client, daemon: FakeCacheService) -> None:
    seen: list[events.Progress] = []
    prompt = kvtier.pin("bot", system=SYSTEM, ttl_s=60, priority=3, cache_salt="pepper", on_progress=seen.append)
    assert (prompt.name, prompt.state, prompt.priority) == ("bot", PromptState.DURABLE, 3)
    kinds = list(dict.fromkeys(type(event) for event in seen))
    assert kinds == [events.Rendered, events.Registered, events.Confirmed, events.Capturing, events.Captured]
    (request,) = daemon.pins
    assert (request.ttl_s, request.cache_salt, request.replace) == (60, "pepper", False)
    assert kvtier.tokens("bot") == tuple(request.tokens)
    recipe = kvtier.get("bot").recipe
    assert (recipe["kind"], recipe["content"]) == ("system", SYSTEM)
    (listed,) = kvtier.list()
    assert listed.name == "bot"


def test_sources_are_values(kvtier: Client, daemon: FakeCacheService) -> None:
    tools = ({"type": "function", "function": {"name": "fly"}},)
    kvtier.pin("m", messages=({"role": "user", "content": "Hello, you parrot"},), tools=tools)
    assert json.loads(daemon.pins[-1].recipe_json)["tools"] == list(tools)
    assert kvtier.pin("t", tokens=iter(range(100)), warm=False).num_tokens == 100
    assert kvtier.pin("t2", tokens=range(50), model="toy").model == "toy"


@pytest.mark.parametrize(
    ("source", "field"),
    [
        ({"system": "a", "text": "b"}, "text"),
        ({"system": " \n"}, "system"),
        ({"system": 3}, "system"),
        ({"text": "half \ud83d"}, "text"),
        ({"messages": []}, "messages"),
        ({"messages": {"role": "user"}}, "messages"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": object()}]}, "messages"),
        ({"tokens": [1, -1]}, "tokens[1]"),
        ({"tokens": []}, "tokens"),
        ({"text": "a", "tools": [{}]}, "tools"),
        ({"system": "a", "tools": ["fly"]}, "tools[0]"),
        ({"system": "a", "chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"system": "a", "model": "none such"}, "model"),
        ({}, "name"),
    ],
)
def test_a_mistake_names_the_argument(kvtier: Client, source: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        kvtier.pin("bot", **source)
    assert caught.value.field == field
    assert "--" not in str(caught.value)
    assert kvtier.list() == []


@pytest.mark.parametrize(
    "source",
    [
        {"messages": ["SECRET"]},
        {"messages": [{"role": "user", "content": {"text": "SECRET"}}]},
        {"messages": "SECRET"},
        {"system": "SECRET \ud83d"},
        {"system": ["SECRET"]},
        {"text": "\ufeffSECRET"},
        {"system": "SECRET", "text": "SECRET"},
        {"text": "SECRET", "tools": ["SECRET"]},
        {"system": "x", "tools": ["SECRET"]},
    ],
)
def test_a_mistake_does_not_quote_the_prompt(kvtier: Client, source: dict[str, Any]) -> None:
    """The application may log it."""
    with pytest.raises(InvalidArgumentError) as caught:
        kvtier.pin("bot", **source)
    assert "SECRET" not in str(caught.value)


def test_without_a_source_the_stored_one_is_rendered_again(
    kvtier: Client, daemon: FakeCacheService, vllm: FakeVllm
) -> None:
    kvtier.pin("bot", system=SYSTEM, cache_salt="pepper")
    vllm.template = lambda messages, tools: "".join(m["content"] for m in messages) + "changed"
    prompt = kvtier.pin("bot")
    assert (prompt.cache_salt, daemon.pins[-1].replace) == ("pepper", True)
    kvtier.pin("ids", tokens=range(100))
    with pytest.raises(InvalidArgumentError, match="give them again with tokens="):
        kvtier.pin("ids")


def test_no_vllm(daemon: FakeCacheService, tmp_path: Path) -> None:
    seen: list[events.Progress] = []
    with Client(tmp_path / "s", url=UNUSED_URL) as client:
        prompt = client.pin("bot", system=SYSTEM, on_progress=seen.append)
        assert prompt.state is PromptState.UNRENDERED
        assert isinstance(seen[-1], events.NotRendered)
        with pytest.raises(RenderError, match="or pass url"):
            client.warm()
        with pytest.raises(RenderError):
            client.pin("bot")


def test_the_environment_names_daemon_and_vllm(
    daemon: FakeCacheService, vllm: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm.api_key = "secret"
    environment = {"KVTIER_SOCKET": str(tmp_path / "s"), "KVTIER_VLLM_URL": vllm.url, "OPENAI_API_KEY": "secret"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with Client() as client:
        assert client.pin("bot", text=SYSTEM).state is PromptState.DURABLE
    with pytest.raises(InvalidArgumentError, match=r"^socket = "):
        Client("/" + "x" * 200)
    with Client(url="ftp://x") as client, pytest.raises(InvalidArgumentError, match=r"^url = "):
        client.warm()


def test_change_and_forget(kvtier: Client, daemon: FakeCacheService) -> None:
    kvtier.pin("bot", text=SYSTEM)
    changed = kvtier.set("bot", ttl_s=3600, public=True)
    assert (changed.public, changed.priority, changed.expires_unix_s > 0) == (True, 0, True)
    with pytest.raises(PromptPinnedError):
        kvtier.evict("bot")
    assert kvtier.evict("bot", tier="host", force=True).num_chunks == 3
    assert kvtier.unpin("bot").pinned is False
    kvtier.evict("bot")
    assert kvtier.list() == []
    assert kvtier.evict_all().num_shared_chunks == 2
    kvtier.pin("bot", text=SYSTEM)
    kvtier.evict_all(namespace_id="nn", force=True)
    assert daemon.evictions[-1].namespace_id == "n" * 64


def test_replace_and_roll_back(kvtier: Client, daemon: FakeCacheService) -> None:
    kvtier.pin("bot", text=SYSTEM)
    with pytest.raises(PromptExistsError):
        kvtier.pin("bot", text=SYSTEM + "And a pirate.")
    seen: list[events.Progress] = []
    assert kvtier.pin("bot", text=SYSTEM + "And a pirate.", replace=True, on_progress=seen.append).name == "bot"
    assert seen[-1] == events.Replaced(name="bot", previous="bot@1")
    assert [prompt.name for prompt in kvtier.history("bot")] == ["bot@1", "bot"]
    assert kvtier.rollback("bot").name == "bot@3"
    (warmed,) = kvtier.warm("bot@3")
    assert warmed.result is events.WarmResult.WARMED
    assert [prompt.name for prompt in kvtier.history("bot")] == ["bot@1", "bot@2", "bot"]
    kvtier.pin("other", text=SYSTEM)
    with pytest.raises(InvalidArgumentError, match=r"^name = 'other': has no old version"):
        kvtier.rollback("other")


def test_status_and_advice(kvtier: Client, daemon: FakeCacheService) -> None:
    daemon.counters = {"acquires": 3}
    status = kvtier.status()
    assert (status.pid, status.counters["acquires"], status.host.num_chunks) == (1, 3, 7)
    (namespace,) = kvtier.namespaces()
    assert namespace.fingerprint["weights"] == {"mode": "sampled"}
    assert kvtier.advise(max_bytes=5).mode == "off"
    assert daemon.budgets == [5]


def test_a_refusal_has_the_daemons_words_and_its_class(kvtier: Client) -> None:
    with pytest.raises(PromptNotFoundError) as caught:
        kvtier.get("none")
    assert isinstance(caught.value, RemoteError)
    assert (caught.value.code, caught.value.kind) == ("NOT_FOUND", "PromptNotFoundError")
    assert str(caught.value) == "no prompt named 'none'; `kvtier list` shows the names"


def test_a_refusal_of_any_kind_is_a_remote_error() -> None:
    """The classes compose their messages from other arguments; the daemon's own text is kept."""
    full = remote_error("RESOURCE_EXHAUSTED", "QuotaExceededError", "it does not fit")
    assert isinstance(full, QuotaExceededError)
    assert (str(full), type(full).__name__) == ("it does not fit", "QuotaExceededError")
    wrong = remote_error("INVALID_ARGUMENT", "InvalidArgumentError", "name = ''")
    assert isinstance(wrong, InvalidArgumentError)
    assert (wrong.field, wrong.value) == ("", None), "the message says it"
    for kind in ("", "NewerError", "KvtierError", "Path", "annotations", "__name__"):
        assert type(remote_error("INTERNAL", kind, "oh")) is RemoteError


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda client: client.recent_requests(limit=-1), r"limit = -1: use 0 to 4096"),
        (lambda client: client.advise(max_bytes=-1), r"max_bytes = -1: use 0 to 18446744073709551615"),
        (lambda client: client.advise(max_bytes=1.5), r"max_bytes = 1.5: must be a whole number"),
        (lambda client: client.evict("bot", tier="gpu"), r"tier = 'gpu': must be one of None, host, disk"),
        (lambda client: client.evict_all(tier=["disk"]), r"tier = .*: must be one of None, host, disk"),
        (lambda client: client.check_ready(tier="x"), r"tier = 'x': must be one of device, host, disk"),
        (lambda client: client.wait_ready(tier="x"), r"tier = 'x': must be one of device, host, disk"),
    ],
)
def test_what_no_argument_can_be_is_an_error_of_kvtier(
    kvtier: Client, daemon: FakeCacheService, call: Callable[[Any], object], said: str
) -> None:
    """These were ValueError and KeyError."""
    with pytest.raises(InvalidArgumentError, match=said):
        call(kvtier)
    assert daemon.evictions == []


def lose(times: int, error: Exception) -> tuple[Callable[..., Any], list[int]]:
    """Return a call that fails `times` times and then answers with nothing, and a list with an item for each call."""
    calls: list[int] = []

    def call(*_: object, **__: object) -> list[Any]:
        calls.append(1)
        if len(calls) <= times:
            raise error
        return []

    return call, calls


def test_only_a_call_that_reads_is_tried_again_and_only_when_the_connection_was_lost(
    kvtier: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = ConnectionLostError("/s")
    silent = DaemonSilentError("/s", 1.0, None, is_stopped=False)
    for error, times, num_calls in ((lost, 1, 2), (lost, 2, 2), (silent, 1, 1)):
        call, calls = lose(times, error)
        monkeypatch.setattr(AdminClient, "list", call)
        try:
            assert kvtier.list() == []
            assert times < num_calls
        except DaemonUnreachableError:
            assert times == num_calls
        assert len(calls) == num_calls
    call, calls = lose(1, lost)
    monkeypatch.setattr(AdminClient, "unpin", call)
    with pytest.raises(ConnectionLostError):
        kvtier.unpin("bot")
    assert len(calls) == 1


def test_a_client_outlives_its_daemon(tmp_path: Path) -> None:
    with Client(tmp_path / "s") as client:
        with pytest.raises(DaemonUnreachableError):
            client.list()
        for _ in range(2):
            with fake_cache_service.serving(FakeCacheService(), tmp_path / "s"):
                assert client.list() == []
            (tmp_path / "s").unlink(missing_ok=True)


def test_threads_share_a_client(kvtier: Client) -> None:
    kvtier.pin("bot", text=SYSTEM)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: kvtier.get("bot").name, range(32))) == {"bot"}


def test_watch_shows_changes_until_it_is_closed(kvtier: Client, daemon: FakeCacheService, vllm: FakeVllm) -> None:
    vllm.on_completion = lambda body: None
    kvtier.pin("bot", text=SYSTEM, warm=False)
    seen: list[Prompt] = []
    began = threading.Event()

    def read() -> None:
        for prompt in watch:
            seen.append(prompt)
            began.set()

    with kvtier.watch("bot") as watch:
        thread = threading.Thread(target=read)
        thread.start()
        assert began.wait(10)
        daemon.capture()
        while seen[-1].state is not PromptState.DURABLE and thread.is_alive():
            thread.join(0.02)
    thread.join(10)
    assert not thread.is_alive()
    assert (seen[0].state, seen[-1].state) == (PromptState.CAPTURING, PromptState.DURABLE)
    with pytest.raises(PromptNotFoundError):
        kvtier.watch("none")
    assert len(list(kvtier.watch("bot", timeout_s=2.0))) == 1


def test_a_file_that_cannot_be_used_is_named(kvtier: Client, tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    with pytest.raises(InvalidArgumentError, match=r"^file = .*: exists; pass overwrite to overwrite it"):
        kvtier.export("bot", tmp_path / "there")
    with pytest.raises(InvalidArgumentError, match=r"^file = .*cannot be read: No such file"):
        kvtier.import_bundle(str(tmp_path / "none"))
    with pytest.raises(RemoteError):
        kvtier.import_bundle(io.BytesIO(b"nothing"))
