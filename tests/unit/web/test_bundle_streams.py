"""Bundles over HTTP, of real daemons: streamed both ways, with nothing left when a client leaves."""

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvtier import Client
from kvtier.config import DaemonConfig, HttpConfig
from kvtier.config.model import AccessConfig
from kvtier.errors import TierIOError
from kvtier.sealing.sealed_stream import MAGIC
from kvtier.web.transport.http_bounds import HttpBounds
from tests.fakes.operator import Stub, pin, status_of, store_last_apart, until
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, running
from tests.fakes.waiting import wait_for
from tests.unit.web.http_rig import served_door

KEYS = [chunk_key(n) for n in range(5)]


def home(folder: Path, name: str) -> DaemonConfig:
    (folder / name).mkdir()
    return replace(config_in(folder / name), http=HttpConfig(listen="127.0.0.1:0"), access=AccessConfig(auth="none"))


async def url_of(stub: Stub) -> str:
    async def served() -> bool:
        return bool((await status_of(stub)).http_url)

    await until(served)
    return f"{(await status_of(stub)).http_url}/api/v1"


def in_thread(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
    return asyncio.to_thread(call, *args, timeout=60, **kwargs)


async def make_durable(stub: Stub, engine: ScriptedEngine) -> None:
    await engine.bind(await pin(stub, "bot", recipe_json='{"kind": "text"}'), KEYS)
    await store_last_apart(stub, engine, KEYS, "bot")


def num_transfers() -> int:
    return sum(thread.name == "kvtier-http-bundle" for thread in threading.enumerate())


def test_down_from_one_daemon_and_up_to_another(tmp_path: Path) -> None:
    async def scenario() -> None:
        first, second = home(tmp_path, "a"), home(tmp_path, "b")
        async with running(first) as stub, ScriptedEngine(first) as engine:
            await make_durable(stub, engine)
            url = await url_of(stub)
            answer = await in_thread(httpx.get, f"{url}/prompts/bot/bundle")
            assert (answer.status_code, answer.headers["content-type"]) == (200, "application/octet-stream")
            missing = await in_thread(httpx.get, f"{url}/prompts/none/bundle")
            assert (missing.status_code, missing.json()["title"]) == (404, "PromptNotFoundError")
            chunks = (await in_thread(httpx.get, f"{url}/prompts/bot/chunks")).json()["chunks"]
            assert chunks == "03" * len(KEYS)
        async with running(second) as stub, ScriptedEngine(second):
            url, bundle = await url_of(stub), answer.content
            pieces = (bundle[start : start + 7000] for start in range(0, len(bundle), 7000))
            made = await in_thread(httpx.post, f"{url}/bundles", params={"name": "copy"}, content=pieces)
            assert made.status_code == 200, made.text
            assert (made.json()["name"], made.json()["num_tokens"]) == ("copy", 80)
            again = await in_thread(httpx.get, f"{url}/prompts/copy/bundle")
            assert len(again.content) > 5000
            damaged = bundle[:-10] + bytes(10)
            refused = await in_thread(httpx.post, f"{url}/bundles", params={"name": "other"}, content=damaged)
            assert (refused.status_code, refused.json()["title"]) == (400, "BundleDamagedError")
            sealed = await in_thread(httpx.post, f"{url}/bundles", content=MAGIC + bytes(300))
            remedy = "is sealed; pass it to `kvtier import --key-file FILE` with its key"
            assert (sealed.status_code, sealed.json()["detail"]) == (400, f"body = '-': {remedy}")
            await asyncio.to_thread(wait_for, lambda: not num_transfers())

    asyncio.run(scenario())


def test_an_upload_that_is_cut_short_leaves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nor a traceback: gRPC logged what reading the body raised, which any client with a token could do for ever."""

    async def scenario() -> None:
        config = home(tmp_path, "a")
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await make_durable(stub, engine)
            url = httpx.URL(await url_of(stub))
            bundle = (await in_thread(httpx.get, f"{url}/prompts/bot/bundle")).content

            def cut_short() -> None:
                assert url.port is not None
                with closing(socket.create_connection(("127.0.0.1", url.port))) as connection:
                    head = "POST /api/v1/bundles?name=half HTTP/1.1\r\nHost: localhost\r\n"
                    head += f"Content-Length: {len(bundle)}\r\n\r\n"
                    connection.sendall(head.encode() + bundle[: len(bundle) // 2])
                    wait_for(lambda: num_transfers() > 0)

            await asyncio.to_thread(cut_short)
            await asyncio.to_thread(wait_for, lambda: not num_transfers())
            names = [each["name"] for each in (await in_thread(httpx.get, f"{url}/prompts")).json()["prompts"]]
            assert names == ["bot"]

    asyncio.run(scenario())
    assert not [each for each in caplog.records if each.exc_info]


def test_a_download_ends_when_its_client_leaves_or_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(_: object, __: str, file: Any, **___: object) -> None:
        while True:
            file.write(bytes(100_000))

    monkeypatch.setattr(Client, "export", endless)
    bounds = HttpBounds(read_timeout_s=0.3, sweep_s=0.05)
    with served_door(bounds=bounds) as server:
        port = httpx.URL(server.url).port
        assert port is not None
        for must_leave in (True, False):
            with closing(socket.create_connection(("127.0.0.1", port))) as connection:
                connection.sendall(b"GET /api/v1/prompts/p/bundle HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert connection.recv(1000).startswith(b"HTTP/1.1 200")
                wait_for(lambda: num_transfers() > 0)
                if not must_leave:
                    wait_for(lambda: not num_transfers())
            wait_for(lambda: not num_transfers())
        assert not server.num_connections


def test_an_export_that_fails_in_the_middle_ends_without_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_: object, __: str, file: Any, **___: object) -> None:
        file.write(b"begun")
        raise TierIOError(Path("pack"), "read", OSError(5, "I/O error"))

    monkeypatch.setattr(Client, "export", failing)
    with served_door() as server, pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"{server.url}/api/v1/prompts/p/bundle")


def test_by_http_1_0_no_bundle_is_sent_that_could_break_off_and_look_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy of nginx asks like that: an export that failed in the middle was a good answer, and a short file."""

    def failing(_: object, __: str, file: Any, **___: object) -> None:
        file.write(b"begun")
        raise TierIOError(Path("pack"), "read", OSError(5, "I/O error"))

    monkeypatch.setattr(Client, "export", failing)
    with served_door() as server:
        port = httpx.URL(server.url).port
        with closing(socket.create_connection(("127.0.0.1", port), timeout=60)) as connection:
            connection.sendall(b"GET /api/v1/prompts/p/bundle HTTP/1.0\r\nHost: localhost\r\n\r\n")
            with connection.makefile("rb") as answer:
                status, _, body = answer.read().partition(b"\r\n")
    assert status.split()[1] == b"505"
    assert b"proxy_http_version 1.1" in body
    assert b"begun" not in body
