"""What HTTP clients can do to a real `kvtier-gateway` in front of a stand-in for vLLM.

It answers or refuses each request, passes nothing that its client did not send as one request, takes no more memory
than its bounds say, and serves others meanwhile. What happens inside one request is in tests/unit/gateway.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from benchmarks.harness.process import free_port
from kvtier.gateway.asgi import send_json
from kvtier.gateway.owners import owner_of
from tests.fakes.process_facts import held
from tests.fakes.waiting import wait_for
from tests.fault.test_hostile_requests import grown
from tests.unit.gateway.test_prompt_caching import messages_request
from tests.unit.gateway.vllm_app import VllmApp

MIB = 1024**2
DEADLINE_S = 60.0
QUIET_S = 1.0
MODULE = "kvtier.gateway.proxy.gateway_command"
PATH = "/v1/messages"
VICTIM = "f" * 16


class Upstream(VllmApp):
    """vLLM's endpoints over HTTP.

    Attributes:
        paths: Of all requests that arrived.
        gate: Requests to `/v1/slow` wait for it.
        num_left: How many of them the gateway has left.
    """

    def __init__(self) -> None:
        super().__init__()
        self.paths: list[str] = []
        self.gate = asyncio.Event()
        self.num_left = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        self.paths.append(scope["path"])
        if scope["path"] == "/v1/slow":
            await self._answer_slowly(receive, send)
            return
        try:
            await super().__call__(scope, receive, send)
        except Exception:  # it parses without care
            await send_json(send, 400, {"error": "unreadable"})
        if len(self.bodies) > 100:
            del self.bodies[:-10], self.scopes[:-10]

    async def _answer_slowly(self, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        self.num_left += 1

    def owners(self) -> set[str]:
        """Return whom the requests name."""
        found = (json.loads(body).get("kv_transfer_params", {}).get("kvtier", {}) for body in self.bodies)
        return {each["owner"] for each in found if "owner" in each}


class Gateway:
    """The process, and the vLLM behind it."""

    def __init__(self, port: int, pid: int, upstream: Upstream, log: Path) -> None:
        self.port, self.pid, self.upstream, self.log = port, pid, upstream, log
        self.url = f"http://127.0.0.1:{port}"

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def raw(self, request: bytes) -> bytes:
        """Send bytes; return what comes back until the gateway closes, or has answered what vLLM got and is quiet."""
        reader, writer = await self.connect()
        writer.write(request)
        answer, num_quiet = b"", 0
        with suppress(ConnectionError):
            while num_quiet < DEADLINE_S:
                try:
                    part = await asyncio.wait_for(reader.read(65536), QUIET_S)
                except TimeoutError:
                    num_quiet += 1
                    if answer and answer.count(b"HTTP/1.1 2") >= len(self.upstream.paths):
                        break
                    continue
                if not part:
                    break
                answer += part
        writer.close()
        return answer

    def private_bytes(self) -> int:
        return held(self.pid, self.log.parent).private_bytes


@asynccontextmanager
async def gateway(folder: Path, *options: str) -> AsyncIterator[Gateway]:
    """Run both; the gateway ends by SIGTERM, without a traceback."""
    upstream, log = Upstream(), folder / "gateway.log"
    port, vllm_port = free_port(), free_port()
    server = uvicorn.Server(uvicorn.Config(upstream, port=vllm_port, log_level="critical", lifespan="off"))
    serving = asyncio.create_task(server._serve())
    argv = [sys.executable, "-m", MODULE, f"--listen=127.0.0.1:{port}", f"--upstream=http://127.0.0.1:{vllm_port}"]
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(*argv, *options, stderr=stderr)
    try:
        await asyncio.to_thread(
            wait_for, lambda: "gateway_ready" in log.read_text() or process.returncode is not None, DEADLINE_S
        )
        assert process.returncode is None, log.read_text()
        yield Gateway(port, process.pid, upstream, log)
        process.terminate()
        assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0, log.read_text()
        assert "Traceback" not in log.read_text()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        server.should_exit = True
        await serving


def run(folder: Path, scenario: Callable[[Gateway, httpx.AsyncClient], Awaitable[None]], *options: str) -> None:
    async def whole() -> None:
        async with gateway(folder, *options) as running, httpx.AsyncClient(base_url=running.url, timeout=60) as client:
            await scenario(running, client)

    asyncio.run(whole())


# One request is one request

SMUGGLED = b"GET /v1/smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = b"0\r\n\r\n" + SMUGGLED
FRAMES: dict[str, tuple[bytes, bytes]] = {
    "length and chunks": (b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n", CHUNKED),
    "chunks and length": (b"Transfer-Encoding: chunked\r\nContent-Length: %d\r\n" % len(CHUNKED), CHUNKED),
    "two lengths": (b"Content-Length: 0\r\nContent-Length: %d\r\n" % len(SMUGGLED), SMUGGLED),
    "a list of lengths": (b"Content-Length: 0, %d\r\n" % len(SMUGGLED), SMUGGLED),
    "a length with a sign": (b"Content-Length: +%d\r\n" % len(SMUGGLED), SMUGGLED),
    "chunks twice": (b"Transfer-Encoding: chunked, chunked\r\n", CHUNKED),
    "chunks that are none": (b"Transfer-Encoding: xchunked\r\nContent-Length: %d\r\n" % len(SMUGGLED), SMUGGLED),
    "a blank before the colon": (b"Transfer-Encoding : chunked\r\nContent-Length: 4\r\n", CHUNKED),
    "a folded line": (b"Transfer-Encoding:\r\n chunked\r\nContent-Length: 4\r\n", CHUNKED),
    "a bare line feed": (b"X: y\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n", CHUNKED),
    "a header that is named": (b"Connection: content-length\r\nContent-Length: %d\r\n" % len(SMUGGLED), SMUGGLED),
    "a NUL": (b"X: a\0b\r\nContent-Length: 0\r\n", SMUGGLED),
}


def test_no_frame_smuggles_a_request(tmp_path: Path) -> None:
    """What comes behind a request is a request of its own to the gateway, or none; vLLM sees no other than it does.

    A gateway and a vLLM that disagree about where a body ends let one client write the next one's request.
    """

    async def scenario(running: Gateway, client: httpx.AsyncClient) -> None:
        for name, (headers, body) in FRAMES.items():
            running.upstream.paths.clear()
            answer = await running.raw(b"POST /v1/outer HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n" + body)
            answered = answer.count(b"HTTP/1.1 2")
            assert len(running.upstream.paths) == answered, f"{name}: {running.upstream.paths} {answer!r}"
            assert running.upstream.paths.count("/v1/smuggled") <= answered - 1 or not answered, name
            assert (await client.get("/v1/next")).json()["path"] == "/v1/next", name

    run(tmp_path, scenario)


# Bodies of any kind


def nested(depth: int) -> bytes:
    return json.dumps(messages_request()).encode()[:-1] + b', "x": ' + b"[" * depth + b"]" * depth + b"}"


BODIES: dict[str, bytes] = {
    "NaN": json.dumps(messages_request(temperature=float("nan"))).encode(),
    "a lone surrogate": json.dumps(messages_request("\ud800")).encode(),
    "an endless number": json.dumps(messages_request()).encode()[:-1] + b', "x": ' + b"9" * 100_000 + b"}",
    "a key twice": json.dumps(messages_request()).encode()[:-1] + b', "messages": []}',
    "no UTF-8": json.dumps(messages_request()).encode()[:-1] + b', "x": "\xff"}',
    "a list": b'["cache_control"]',
    "half": json.dumps(messages_request()).encode()[:-20],
    "nothing": b"",
}


def test_any_body_is_answered_and_leaves_no_traceback(tmp_path: Path) -> None:
    async def scenario(running: Gateway, client: httpx.AsyncClient) -> None:
        for name, body in BODIES.items():
            answer = await client.post(PATH, content=body, headers={"authorization": f"Bearer {name}"})
            assert answer.status_code in (200, 400), name
        for depth in [*range(900, 1000, 3), 100_000]:
            answer = await client.post(PATH, content=nested(depth), headers={"authorization": "Bearer x"})
            assert answer.status_code in (200, 400), depth

    run(tmp_path, scenario)


def test_a_client_names_no_owner(tmp_path: Path) -> None:
    """Over HTTP, with several headers of a name, at several endpoints; inside one body: test_hidden_instructions.py."""
    own = json.dumps({"messages": [], "kv_transfer_params": {"kvtier": {"pin": True, "owner": VICTIM}}})

    async def scenario(running: Gateway, client: httpx.AsyncClient) -> None:
        headers = [("authorization", "Bearer mine"), ("authorization", "Bearer other"), ("x-api-key", "third")]
        for path in ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate"):
            for body in (own, own.replace("kvtier", "kvtie\\u0072"), own.encode("utf-16")):
                await client.post(path, content=body, headers=[*headers, ("content-type", "application/json")])
        assert len(running.upstream.bodies) == 9
        assert running.upstream.owners() == {owner_of([(b"x-api-key", b"mine")])}

    run(tmp_path, scenario)


# Clients without end


def test_keys_without_end_grow_nothing(tmp_path: Path) -> None:
    async def ask(client: httpx.AsyncClient, first: int, number: int) -> None:
        for key in range(first, first + number):
            body = messages_request(f"question {key}", system=[{"type": "text", "text": f"prompt {key}"}])
            body["cache_control"] = {"type": "ephemeral"}
            answer = await client.post(PATH, json=body, headers={"x-api-key": f"key {key}"})
            assert answer.status_code == 200

    async def scenario(running: Gateway, client: httpx.AsyncClient) -> None:
        await ask(client, 0, 200)
        before = running.private_bytes()
        await ask(client, 200, 400)
        assert grown(running.private_bytes() - before) < 8 * MIB

    run(tmp_path, scenario)


def test_bodies_that_never_end_are_held_up_to_the_bound(tmp_path: Path) -> None:
    """Each connection sends all but the last byte. They take half of what all bodies may, and others are served."""
    num_clients, size = 60, 2 * MIB  # with --max-body 2MiB 32 MiB are held

    async def stall(running: Gateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await running.connect()
        writer.write(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (PATH.encode(), size))
        for _ in range(size // 65536 - 1):
            writer.write(bytes(65536))
        writer.write(bytes(65535))
        return reader, writer

    async def status(reader: asyncio.StreamReader) -> int:
        async with asyncio.timeout(DEADLINE_S):
            return int((await reader.readline()).split()[1])

    async def scenario(running: Gateway, client: httpx.AsyncClient) -> None:
        assert (await client.post(PATH, json=messages_request())).status_code == 200
        before = running.private_bytes()
        stalled = [await stall(running) for _ in range(num_clients)]
        answers = [asyncio.create_task(status(reader)) for reader, _ in stalled]
        done: set[Any] = set()
        while len(done) < num_clients - 8:  # seven or eight fit
            more, _ = await asyncio.wait(set(answers) - done, return_when=asyncio.FIRST_COMPLETED, timeout=DEADLINE_S)
            assert more
            done |= more
        assert {task.result() for task in done} == {429}
        assert grown(running.private_bytes() - before) < 64 * MIB, "of 120 MiB that were sent"
        assert (await client.get("/health/live")).status_code == 200
        elsewhere = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
        async with httpx.AsyncClient(base_url=running.url, transport=elsewhere, timeout=60) as other:
            assert (await other.post(PATH, json=messages_request("y" * 1_600_000))).status_code == 200
        for _, writer in stalled:
            writer.close()
        await answered(client, 200)
        for task in set(answers) - done:
            task.cancel()
        await asyncio.gather(*answers, return_exceptions=True)

    run(tmp_path, scenario, "--max-body=2MiB")


async def answered(client: httpx.AsyncClient, status: int) -> None:
    """Wait until a small request gets this answer."""
    async with asyncio.timeout(DEADLINE_S):
        while (await client.post(PATH, json=messages_request())).status_code != status:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


HEADS: dict[str, Callable[[], bytes]] = {
    "a header": lambda: b"a" * 65536,
    "many headers": lambda: b"x: y\r\n" * 10922,
    "a path": lambda: b"a" * 65536,
}


def test_heads_that_never_end_are_refused(tmp_path: Path) -> None:
    """One client with 64 MiB of short headers took 1.3 GiB of the gateway's memory."""

    async def scenario(running: Gateway, client: httpx.AsyncClient) -> None:
        before = running.private_bytes()
        for name, part in HEADS.items():
            _, writer = await running.connect()
            writer.write(b"GET /v1/" if name == "a path" else b"GET /v1/x HTTP/1.1\r\nHost: x\r\nX: ")
            with pytest.raises(ConnectionError):
                await send_for_ever(writer, part())
        assert grown(running.private_bytes() - before) < 16 * MIB
        assert (await client.get("/health/live")).status_code == 200
        assert len(running.log.read_text()) < 1000

    run(tmp_path, scenario)


async def send_for_ever(writer: asyncio.StreamWriter, part: bytes) -> None:
    for _ in range(1024):
        writer.write(part)
        await writer.drain()


def test_what_comes_behind_a_body_is_no_header(tmp_path: Path) -> None:
    """A proxy in front sets who the owner is; a client sent the header once more, behind the chunks of its body."""
    own = json.dumps({"messages": [], "kv_transfer_params": {"kvtier": {"pin": True}}}).encode()

    async def scenario(running: Gateway, client: httpx.AsyncClient) -> None:
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        )
        body = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\nX-Tenant: victim\r\n\r\n" % (len(own), own)
        assert b" 200 " in await running.raw(head + body)
        assert running.upstream.owners() == set()
        assert b"x-tenant" not in dict(running.upstream.scopes[-1]["headers"])

    run(tmp_path, scenario, "--owner-header=x-tenant")


def test_clients_that_send_slowly_or_leave_end_with_their_requests(tmp_path: Path) -> None:
    """Twenty take all the requests that may run; when they leave, others are served, and vLLM has none of theirs."""

    async def scenario(running: Gateway, client: httpx.AsyncClient) -> None:
        writers = []
        for number in range(20):
            _, writer = await running.connect()
            body = b"GET /v1/slow HTTP/1.1\r\nHost: x\r\n\r\n"
            if number % 2:
                body = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{"
            writer.write(body)
            writers.append(writer)
        # Before another request, which would take the place of one of them.
        await asyncio.to_thread(wait_for, lambda: running.upstream.paths.count("/v1/slow") == 10, DEADLINE_S)
        await answered(client, 503)
        assert (await client.get("/health/live")).status_code == 200
        for writer in writers:
            writer.close()
        await answered(client, 200)
        await asyncio.to_thread(wait_for, lambda: running.upstream.num_left == 10, DEADLINE_S)

    run(tmp_path, scenario, "--max-requests=20")
