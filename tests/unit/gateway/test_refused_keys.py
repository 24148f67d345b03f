"""Inside vLLM no long body is held, or parsed, for a caller that vLLM refuses.

The app stands before vLLM's check of the API key: a caller without one had 32 MiB read and parsed on the event loop of
the API server.
"""

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.gateway import PromptCaching, boundaries, prompt_caching
from kvtier.gateway.asgi import LONG_BYTES, Message
from kvtier.gateway.refused_keys import MAX_AGE_S, MAX_KEYS, UNCHECKED_BYTES, RefusedKeys
from tests.unit.gateway.test_hidden_instructions import PLAIN
from tests.unit.gateway.test_prompt_caching import KEY, OWNER, messages_request
from tests.unit.gateway.vllm_app import Client, Response, VllmApp

LONG = [(b"content-length", str(UNCHECKED_BYTES + 1).encode())]
CHUNKED = [(b"content-length", b"10"), (b"transfer-encoding", b"chunked")]


class InsideVllm:
    """The app where vLLM has it; counts the parts of a body that are read."""

    def __init__(self, api_key: str = "right") -> None:
        self.inner = VllmApp(api_key=api_key)
        self.inner_app = SimpleNamespace(state=SimpleNamespace(engine_client=object()))
        self.caching = PromptCaching(self.inner)
        self.num_read = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def counted() -> Message:
            self.num_read += 1
            message: Message = await receive()
            return message

        await self.caching({**scope, "app": self.inner_app}, counted, send)

    def post(self, headers: Any, *bodies: bytes, key: str = "wrong") -> Response:
        parts = [{"type": "http.request", "body": body, "more_body": True} for body in bodies]
        parts.append({"type": "http.request", "body": b"", "more_body": False})
        client = Client(self, authorization=f"Bearer {key}")
        return asyncio.run(client.send("POST", "/v1/messages", list(parts), headers))


@pytest.mark.parametrize("headers", [LONG, CHUNKED, []])
def test_a_long_body_of_a_caller_without_a_key_is_not_read(headers: Any) -> None:
    app = InsideVllm()
    answer = app.post(headers, b'{"cache_control": ')
    assert (answer.status, answer.json()) == (401, {"error": "Unauthorized"})
    assert app.num_read == 0


def test_of_a_caller_with_the_key_it_is_read() -> None:
    app = InsideVllm()
    body = json.dumps(messages_request()).encode()
    assert app.post([], body[:50], body[50:], key="right").status == 200
    assert app.inner.last["kv_transfer_params"]["kvtier"]["breakpoints"]


def test_where_vllm_has_no_key_bodies_are_read() -> None:
    app = InsideVllm(api_key="")
    assert app.post(LONG, json.dumps(messages_request()).encode()).status == 200
    assert app.inner.num_renders == 2


def test_an_endpoint_without_a_check_gets_no_instruction_of_a_refused_caller() -> None:
    """Such a body passes unread, so an instruction in it would name any owner."""

    class Unguarded(VllmApp):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            self.api_key = "right" if scope["path"] == "/v1/models" else ""
            await super().__call__(scope, receive, send)

    app = InsideVllm()
    app.inner = Unguarded()
    app.caching = PromptCaching(app.inner)
    assert app.post(LONG, b'{"messages": []}').status == 200
    assert app.post(LONG, PLAIN).status == 413


def test_vllm_is_asked_once_a_minute_and_a_bounded_number_of_keys_is_known() -> None:
    asked: list[bytes] = []
    now_s = 0.0

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        assert (scope["method"], scope["path"]) == ("GET", "/root/v1/models")
        asked.append(dict(scope["headers"])[b"authorization"])
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    def scope(key: str) -> Any:
        headers = [(b"authorization", key.encode())]
        return {"type": "http", "method": "POST", "path": "/root/v1/messages", "root_path": "/root", "headers": headers}

    keys = RefusedKeys(clock=lambda: now_s)
    for now_s in (0.0, MAX_AGE_S - 1, MAX_AGE_S + 1):  # noqa: B007 (the clock reads it)
        assert asyncio.run(keys.refuse(inner, scope("a")))
    assert len(asked) == 2
    for number in range(MAX_KEYS + 10):
        asyncio.run(keys.refuse(inner, scope(str(number))))
    assert len(keys._known) == MAX_KEYS


def test_a_vllm_that_fails_to_say_refuses_no_one() -> None:
    async def inner(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError

    assert not asyncio.run(RefusedKeys().refuse(inner, {"headers": []}))


class Threads:
    """Notes in which thread functions of modules are called.

    Attributes:
        on_loop: Names of those that were called in the event loop's thread.
        elsewhere: Of those in other threads.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.on_loop: list[str] = []
        self.elsewhere: list[str] = []

    def note(self, module: Any, name: str) -> None:
        """Note calls of a function."""
        called = getattr(module, name)

        def noted(*args: Any, **named: Any) -> Any:
            is_loops = threading.current_thread() is threading.main_thread()
            (self.on_loop if is_loops else self.elsewhere).append(name)
            return called(*args, **named)

        self._patch.setattr(module, name, noted)


@pytest.mark.parametrize("is_long", [False, True])
def test_what_takes_long_with_a_long_body_leaves_the_event_loop(monkeypatch: pytest.MonkeyPatch, is_long: bool) -> None:
    """It was parsed in a thread, and then written up to 12 times on the loop, before vLLM had looked at the key."""
    threads = Threads(monkeypatch)
    threads.note(boundaries, "_digests")
    threads.note(boundaries, "common_prefix")
    for name in ("_parsed", "read_markers", "to_json"):
        threads.note(prompt_caching, name)
    inner = VllmApp(api_key="secret")
    body = json.dumps(messages_request(question="y" * (LONG_BYTES if is_long else 1000))).encode()
    for _ in range(2):
        assert asyncio.run(Client(PromptCaching(inner), **KEY).post("/v1/messages", body)).status == 200
        assert inner.last["kv_transfer_params"]["kvtier"]["owner"] == OWNER
    work = ["_parsed", "read_markers", "_digests", "to_json", "to_json", "common_prefix", "to_json"]
    answers = ["_parsed", "_parsed"]  # of vLLM to two renderings, and short
    assert sorted(threads.on_loop) == sorted(2 * (answers if is_long else work + answers))
    assert sorted(threads.elsewhere) == sorted(2 * (work if is_long else []))


def test_an_instruction_in_a_long_body_is_written_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads(monkeypatch)
    for name in ("_parsed", "to_json"):
        threads.note(prompt_caching, name)
    inner = VllmApp()
    body = PLAIN[:-1] + b', "x": "' + b"y" * LONG_BYTES + b'"}'
    assert asyncio.run(Client(PromptCaching(inner), **KEY).post("/v1/chat/completions", body)).status == 200
    assert inner.last["kv_transfer_params"]["kvtier"]["owner"] == OWNER
    assert (threads.on_loop, threads.elsewhere) == ([], ["_parsed", "to_json"])
