"""A request that asks something of kvtier does so as the owner that the caller is, however the client writes it.

What vLLM's JSON parser reads and this app did not find passed with an owner of the client's choice, and took the limits
of another one: at an endpoint without markers, behind an escape, in UTF-16, under a `Content-Encoding` that was not
true, or in a body beyond the bound.
"""

import asyncio
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.gateway import PromptCaching
from kvtier.gateway.client_instructions import guarded, may_instruct
from kvtier.gateway.gateway_settings import MarkerSettings
from kvtier.gateway.markers.marked_request import Api
from kvtier.gateway.owners import owner_of
from tests.unit.gateway.test_prompt_caching import KEY, OWNER, messages_request, post
from tests.unit.gateway.vllm_app import Client, VllmApp

Json = dict[str, Any]
VICTIM = "f" * 16
BODY: Json = {"messages": [], "input": [], "kv_transfer_params": {"kvtier": {"pin": True, "owner": VICTIM}}}
PATHS = [*Api, "/v1/completions", "/inference/v1/generate", "/v1/chat/completions/batch"]
UNGUARDED = "/invocations"
PLAIN = json.dumps(BODY).encode()


class AnyPath(VllmApp):
    """Answers at every path, and reads bodies as vLLM does, whatever headers say."""

    async def _answer(self, path: str, body: Json, send: Any) -> None:
        await super()._answer("/v1/chat/completions", body | {"messages": []}, send)


def escaped(body: bytes, name: str) -> bytes:
    """Escape a letter of a name, as JSON allows for any."""
    return body.replace(name.encode(), (name[:-1] + f"\\u{ord(name[-1]):04X}").encode())


HIDDEN: dict[str, bytes] = {
    "nothing": PLAIN,
    "an escape in the name": escaped(PLAIN, "kvtier"),
    "escapes in all letters": PLAIN.replace(
        b'"kvtier"', b'"' + b"".join(b"\\u%04x" % code for code in b"kvtier") + b'"'
    ),
    "an escape in the field": escaped(escaped(PLAIN, "kv_transfer_params"), "kvtier"),
    "utf-16": PLAIN.decode().encode("utf-16"),
    "utf-16 without a mark": PLAIN.decode().encode("utf-16-be"),
    "utf-32": PLAIN.decode().encode("utf-32-le"),
    "a mark of utf-8": b"\xef\xbb\xbf" + PLAIN,
    "a field twice": PLAIN.replace(b'{"messages"', b'{"kv_transfer_params": {}, "messages"'),
    "an instruction twice": PLAIN.replace(b'"owner"', b'"owner": "' + b"e" * 16 + b'", "owner"'),
}


def owners_at_vllm(inner: VllmApp) -> set[str]:
    """Return the owner that vLLM would read."""
    texts = [json.loads(body) for body in inner.bodies]
    return {text["kv_transfer_params"]["kvtier"].get("owner", "") for text in texts}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", HIDDEN.values(), ids=HIDDEN)
@pytest.mark.parametrize("headers", [{}, {"content_encoding": "gzip"}, {"content_type": "application/JSON; charset=x"}])
def test_the_owner_is_the_caller(path: str, body: bytes, headers: dict[str, str]) -> None:
    inner = AnyPath()
    answer = post(PromptCaching(inner), path, body, KEY | headers, parts=3)
    assert answer.status == 200
    assert owners_at_vllm(inner) == {OWNER}


def test_a_key_that_vllm_does_not_check_is_no_owner() -> None:
    """A client without vLLM's key was any number of owners there, each with limits of its own."""
    inner = AnyPath()
    for key in ("one", "two"):
        post(PromptCaching(inner), UNGUARDED, PLAIN, {"authorization": f"Bearer {key}"})
    assert len(inner.bodies) == 2
    assert owners_at_vllm(inner) == {""}
    post(PromptCaching(inner, MarkerSettings(owner_header="x-tenant")), UNGUARDED, PLAIN, {"x_tenant": "blue"})
    assert owners_at_vllm(inner) == {"", owner_of([(b"x-tenant", b"blue")], "x-tenant")}


@pytest.mark.parametrize("path", [*PATHS, UNGUARDED])
def test_without_a_key_it_is_no_one(path: str) -> None:
    inner = AnyPath()
    post(PromptCaching(inner), path, escaped(PLAIN, "kvtier"), {})
    assert owners_at_vllm(inner) == {""}


def test_what_comes_behind_the_body_is_no_header() -> None:
    """uvicorn with httptools adds trailers to the headers: a proxy in front had not seen these."""
    inner, headers = AnyPath(), [(b"content-type", b"application/json")]
    messages = [{"type": "http.request", "body": PLAIN, "more_body": False}]

    async def receive() -> Any:
        headers.append((b"x-tenant", b"victim"))
        return messages.pop(0)

    async def send(message: Any) -> None:
        pass

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    asyncio.run(PromptCaching(inner, MarkerSettings(owner_header="x-tenant"))(scope, receive, send))
    assert owners_at_vllm(inner) == {""}


def test_wrong_instructions_are_refused_at_every_endpoint() -> None:
    inner = AnyPath()
    answer = post(PromptCaching(inner), "/v1/completions", PLAIN.replace(b'"pin": true', b'"pin": 7'))
    assert answer.status == 400
    assert answer.json()["error"]["param"] == "kv_transfer_params.kvtier.pin"
    assert inner.bodies == []


def test_arguments_of_the_engine_carry_none() -> None:
    """vLLM's endpoint for tokens takes the engine's own sampling parameters, and they may hold an instruction."""
    inner = AnyPath()
    body = {"sampling_params": {"extra_args": {"kv_transfer_params": BODY["kv_transfer_params"]}}}
    answer = post(PromptCaching(inner), "/inference/v1/generate", body)
    assert answer.status == 400
    assert answer.json()["error"]["param"] == "sampling_params.extra_args.kv_transfer_params.kvtier"
    assert inner.bodies == []


@pytest.mark.parametrize("body", HIDDEN.values(), ids=HIDDEN)
@pytest.mark.parametrize("parts", [1, 7, 1000])
def test_beyond_the_bound_it_is_refused(body: bytes, parts: int) -> None:
    """Nothing is rewritten there, so nothing may ask anything."""
    inner = VllmApp()
    blanks = " ".encode("utf-16-le" if b"\0" in body[:4] else "utf-8") * 3000
    app = PromptCaching(inner, MarkerSettings(max_body_bytes=1500))
    answer = post(app, "/v1/chat/completions", blanks + body, parts=parts)
    assert answer.status == 413
    assert "KVTIER_GATEWAY_MAX_BODY" in answer.json()["error"]["message"]
    assert inner.bodies == []


def test_what_is_no_json_is_not_looked_at() -> None:
    """An upload of audio has NULs, and is none of JSON's encodings."""
    inner = AnyPath()
    app = PromptCaching(inner, MarkerSettings(max_body_bytes=1500))
    for size in (100, 5000):
        post(app, "/v1/audio/transcriptions", bytes(size) + PLAIN, {"content_type": "multipart/form-data; boundary=x"})
    assert [len(body) for body in inner.bodies] == [len(PLAIN) + 100, len(PLAIN) + 5000]


def test_what_is_compressed_passes_as_it_is() -> None:
    inner = AnyPath()
    body = b"\x1f\x8b\0\0 not what it says it is"
    post(PromptCaching(inner), "/v1/other", body, KEY | {"content_encoding": "gzip"})
    assert inner.bodies == [body]


ESCAPES = st.lists(st.integers(0, 2), min_size=6, max_size=6)


@given(escapes=ESCAPES, before=st.binary(max_size=20), cut=st.integers(1, 60))
def test_any_spelling_is_found_wherever_it_is_cut(escapes: list[int], before: bytes, cut: int) -> None:
    ways = ("{}", "\\u{:04x}", "\\u{:04X}")
    spelt = "".join(ways[way].format(ord(each) if way else each) for way, each in zip(escapes, "kvtier", strict=True))
    body = before + f'"{spelt}"'.encode()
    assert json.loads(f'"{spelt}"') == "kvtier"
    assert may_instruct(body)
    parts = re.findall(b"(?s).{1,%d}" % cut, body)

    async def read() -> bool:
        messages = [{"type": "http.request", "body": part} for part in parts]

        async def receive() -> Any:
            return messages.pop(0)

        receive_guarded = guarded(receive)
        try:
            for _ in range(len(parts)):
                await receive_guarded()
        except Exception:
            return True
        return False

    assert asyncio.run(read())


# What cannot be written again


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_nesting_of_any_depth_is_answered(path: str) -> None:
    """What Python's stack was long enough to read, and too short to write, ended in a traceback."""
    inner = AnyPath()
    answered = set()
    for depth in [*range(850, 1000), 10_000, 1_000_000]:
        body = json.dumps(messages_request()).encode()[:-1] + b', "x": ' + b"[" * depth + b"]" * depth + b"}"
        inner.bodies.clear()
        try:
            answer = asyncio.run(Client(PromptCaching(inner), **KEY).post(path, body))
        except RecursionError:  # of the stand-in, which parses it too
            assert inner.bodies
            continue
        answered.add(answer.status)
        assert answer.status in (200, 400)
    assert 200 in answered


def test_an_instruction_behind_nesting_does_not_pass() -> None:
    """What is too deep for the stack of a gateway may not be for that of a vLLM in another process."""
    inner = VllmApp()
    body = PLAIN[:-1] + b', "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert post(PromptCaching(inner), "/v1/chat/completions", body).status == 400
    assert inner.bodies == []
