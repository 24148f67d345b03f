"""The proxy: what passes, whom it asks, what it bounds, and what clients see when a vLLM is away."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar

import httpx
import pytest

from kvtier.gateway import PromptCaching
from kvtier.gateway.asgi import CutShortError, Message
from kvtier.gateway.gateway_settings import MarkerSettings
from kvtier.gateway.proxy.request_bounds import RequestBounds
from kvtier.gateway.proxy.reverse_proxy import ReverseProxy
from kvtier.gateway.proxy.upstreams import MAX_KEYS, MIN_REFRESH_S, REFRESH_S, Upstreams
from tests.unit.gateway.vllm_app import Client, Response

ONE, TWO = httpx.URL("http://one:8000"), httpx.URL("http://two:8000/prefix")
Handler = Callable[[httpx.Request], Any]


class Parts(httpx.AsyncByteStream):
    """A body that comes in parts."""

    def __init__(self, *parts: bytes, gate: asyncio.Event | None = None, error: Exception | None = None) -> None:
        self._parts, self._gate, self._error = parts, gate, error
        self.num_read = 0
        self.is_closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            self.num_read += 1
            yield part
            if self._gate is not None:
                await self._gate.wait()
        if self._error is not None:
            raise self._error

    async def aclose(self) -> None:
        """Close it."""
        self.is_closed = True


class Transport(httpx.AsyncBaseTransport):
    """Vllms that answer with a function."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.requests: list[httpx.Request] = []
        self.is_closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer."""
        await request.aread()
        self.requests.append(request)
        answer = self._handler(request)
        response = await answer if asyncio.iscoroutine(answer) else answer
        assert isinstance(response, httpx.Response)
        return response

    async def aclose(self) -> None:
        """Close it."""
        self.is_closed = True


def proxy(handler: Handler, *urls: httpx.URL, **bounds: float) -> tuple[RequestBounds, Transport]:
    """Return a proxy within its bounds, and its transport."""
    transport = Transport(handler)
    upstreams = Upstreams(urls or (ONE,), transport)
    app = ReverseProxy(upstreams, transport, max_body_bytes=1000, timeouts=httpx.Timeout(5))
    limits: dict[str, Any] = {"max_requests": 4, "max_held_bytes": 2000} | bounds
    return RequestBounds(app, **limits), transport


def post(app: Any, path: str, body: Any, **headers: str) -> Response:
    """Send a request."""
    return asyncio.run(Client(app, **headers).post(path, body))


def get(app: Any, path: str) -> Response:
    """Send a request without a body."""
    return asyncio.run(Client(app).send("GET", path, [{"type": "http.request"}]))


def ok(request: httpx.Request) -> httpx.Response:
    """Answer with what was asked."""
    return httpx.Response(200, headers={"x-own": "1", "connection": "x-hop", "x-hop": "1"}, stream=Parts(b"a", b"b"))


def streamed(value: Any) -> httpx.Response:
    """Return an answer that was not read yet."""
    return httpx.Response(200, stream=Parts(json.dumps(value).encode()))


def models(served: dict[str, list[str]]) -> Handler:
    """Answer with models by host, and with the host's name to everything else."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/v1/models"):
            return streamed({"data": [{"id": name} for name in served[request.url.host]]})
        return streamed({"host": request.url.host, "path": request.url.path})

    return answer


class TestPassing:
    """Requests and answers."""

    def test_body_headers_and_parts_pass_and_those_of_one_connection_do_not(self) -> None:
        app, transport = proxy(ok)
        answer = post(app, "/v1/messages", b'{"a":  1}', authorization="Bearer x", te="trailers", connection="x-mine")
        (request,) = transport.requests
        assert (str(request.url), request.content) == ("http://one:8000/v1/messages", b'{"a":  1}')
        assert request.headers["authorization"] == "Bearer x"
        assert request.headers["host"] == "one:8000"
        assert request.headers["content-length"] == "9"
        assert not request.headers.keys() & {"te", "connection", "user-agent", "accept-encoding"}
        assert answer.headers == {"x-own": "1"}
        assert answer.parts == [b"a", b"b", b""]

    def test_a_path_under_a_base_url_keeps_its_escapes_and_query(self) -> None:
        app, transport = proxy(ok, TWO)
        scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/v1/responses/a/b", "headers": []}
        scope |= {"raw_path": b"/v1/responses/a%2Fb", "query_string": b"x=%20"}

        async def receive() -> Message:
            return {"type": "http.request"} if not transport.requests else await asyncio.Event().wait()  # type: ignore[return-value]

        async def send(message: Message) -> None:
            pass

        asyncio.run(app(scope, receive, send))
        assert str(transport.requests[0].url) == "http://two:8000/prefix/v1/responses/a%2Fb?x=%20"

    @pytest.mark.parametrize(
        ("path", "query"),
        [(b"/v1/models#x", b""), (b"/v1/x\xff", b""), (b"/v1/x", b"a=\xe9"), (b"/v1/x", b"a#b"), (b"/v1/x", b"a\x01")],
    )
    def test_a_target_that_is_no_url_is_refused(self, path: bytes, query: bytes) -> None:
        """Whatever a client writes there: it ended in a traceback."""
        app, transport = proxy(ok)
        scope: dict[str, Any] = {"type": "http", "method": "GET", "path": path.decode("latin-1"), "headers": []}
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request"} if not sent else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        asyncio.run(app(scope | {"raw_path": path, "query_string": query}, receive, send))
        assert Response(sent).status == 400
        assert transport.requests == []

    @pytest.mark.parametrize(("body", "length"), [(b"", b"0"), (b"{}", b"2")])
    def test_the_length_is_that_of_the_body(self, body: bytes, length: bytes) -> None:
        """With another one vLLM would take the next request on the connection for the rest of this one."""
        app, transport = proxy(ok)
        headers = [(b"content-length", b"40"), (b"transfer-encoding", b"chunked")]
        asyncio.run(Client(app).send("POST", "/v1/x", [{"type": "http.request", "body": body}], headers))
        (request,) = transport.requests
        assert request.headers["content-length"].encode() == length
        assert "transfer-encoding" not in request.headers

    @pytest.mark.parametrize(
        "path",
        ["/sleep", "/reset_prefix_cache", "/", "/v1/../sleep", "/v1/..", "/v1/load_lora_adapter",
         "/v1//unload_lora_adapter/", "/inference/v1/abort_requests"],
    )  # fmt: skip
    def test_paths_that_change_the_server_do_not_pass(self, path: str) -> None:
        app, transport = proxy(ok)
        answer = post(app, path, {})
        assert answer.status == 404
        assert path in answer.json()["error"]["message"]
        assert transport.requests == []

    def test_the_next_part_is_read_when_the_last_one_was_sent(self) -> None:
        body = Parts(*[b"x"] * 100)
        app, _ = proxy(lambda request: httpx.Response(200, stream=body))

        async def slow() -> int:
            first, go_on = asyncio.Event(), asyncio.Event()

            async def send(message: Message) -> None:
                if message["type"] == "http.response.body" and not first.is_set():
                    first.set()
                    await go_on.wait()

            scope = {"type": "http", "method": "GET", "path": "/v1/x", "headers": [], "query_string": b""}
            messages: list[Message] = [{"type": "http.request"}]

            async def receive() -> Message:
                if messages:
                    return messages.pop()
                await asyncio.Event().wait()
                raise AssertionError

            task = asyncio.create_task(app(scope, receive, send))
            await first.wait()
            for _ in range(10):
                await asyncio.sleep(0)
            num_read = body.num_read
            go_on.set()
            await task
            return num_read

        assert asyncio.run(slow()) == 1
        assert body.num_read == 100

    def test_a_client_that_leaves_ends_its_request_at_vllm(self) -> None:
        async def leave() -> Parts:
            body = Parts(b"x", b"y", gate=asyncio.Event())
            app, _ = proxy(lambda request: httpx.Response(200, stream=body))
            left = asyncio.Event()
            messages: list[Message] = [{"type": "http.request", "body": b"{}"}]

            async def receive() -> Message:
                if messages:
                    return messages.pop()
                await left.wait()
                return {"type": "http.disconnect"}

            async def send(message: Message) -> None:
                if message["type"] == "http.response.body":
                    left.set()

            scope = {"type": "http", "method": "POST", "path": "/v1/x", "headers": [], "query_string": b""}
            await asyncio.wait_for(app(scope, receive, send), 5)
            return body

        body = asyncio.run(leave())
        assert body.is_closed
        assert body.num_read == 1


class TestManyVllms:
    """Requests go by the model that they name."""

    def test_to_the_vllm_that_serves_it(self) -> None:
        app, transport = proxy(models({"one": ["a"], "two": ["b", "a"]}), ONE, TWO)
        assert post(app, "/v1/messages", {"model": "b"}).json() == {"host": "two", "path": "/prefix/v1/messages"}
        assert post(app, "/v1/messages", {"model": "a"}).json()["host"] == "one"
        asked = [request for request in transport.requests if request.url.path.endswith("/models")]
        assert len(asked) == 2

    def test_none_that_serves_it_is_an_error_and_asked_again_a_second_later(self) -> None:
        now_s, served = 100.0, {"one": ["a"], "two": ["b"]}
        transport = Transport(models(served))
        upstreams = Upstreams((ONE, TWO), transport, clock=lambda: now_s)

        async def find(name: str) -> httpx.URL | None:
            return await upstreams.serving(name, [(b"authorization", b"Bearer x")])

        async def run() -> None:
            nonlocal now_s
            assert await find("c") is None
            assert await find("c") is None
            assert len(transport.requests) == 2
            assert transport.requests[0].headers["authorization"] == "Bearer x"
            served["two"] = ["c"]
            now_s += MIN_REFRESH_S + 0.1
            assert await find("c") == TWO
            assert await find("a") == ONE
            now_s += REFRESH_S + 1
            served["one"], served["two"] = [], ["a"]
            assert await find("a") == TWO

        asyncio.run(run())

    def test_one_that_is_away_keeps_its_models(self) -> None:
        now_s, away = 100.0, False
        answer = models({"one": ["a"], "two": ["b"]})

        def handler(request: httpx.Request) -> Any:
            if away and request.url.host == "one":
                raise httpx.ConnectError("connection refused")
            return answer(request)

        upstreams = Upstreams((ONE, TWO), Transport(handler), clock=lambda: now_s)

        async def run() -> None:
            nonlocal now_s, away
            assert await upstreams.serving("a", []) == ONE
            now_s, away = now_s + REFRESH_S + 1, True
            assert await upstreams.serving("a", []) == ONE

        asyncio.run(run())

    def test_an_unknown_model_and_none_at_all_are_named(self) -> None:
        app, _ = proxy(models({"one": [], "two": []}), ONE, TWO)
        answer = post(app, "/v1/chat/completions", {"model": "x"})
        assert answer.status == 404
        assert "names the model 'x', which no vLLM serves" in answer.json()["error"]["message"]
        assert "names no model" in post(app, "/v1/messages", b"{").json()["error"]["message"]

    def test_a_wrong_key_is_refused_as_vllm_does(self) -> None:
        """It was an empty list, and no model was known."""

        def refuse(request: httpx.Request) -> httpx.Response:
            body = json.dumps({"error": "Unauthorized", "host": request.url.host}).encode()
            return httpx.Response(401, stream=Parts(body))

        app, _ = proxy(refuse, ONE, TWO)
        for answer in (get(app, "/v1/models"), post(app, "/v1/chat/completions", {"model": "x"})):
            assert (answer.status, answer.json()) == (401, {"error": "Unauthorized", "host": "one"})

    def test_callers_with_a_wrong_key_keep_no_one_from_being_routed(self) -> None:
        """A list that no vLLM gave counted as one, so those who had a key were not asked for."""
        now_s, served = 100.0, {"one": ["a"], "two": ["b"]}
        answer = models(served)

        def handler(request: httpx.Request) -> Any:
            is_right = request.headers.get("authorization") == "Bearer right"
            return answer(request) if is_right else httpx.Response(401, stream=Parts(b"{}"))

        transport = Transport(handler)
        upstreams = Upstreams((ONE, TWO), transport, clock=lambda: now_s)
        right, wrong = ([(b"authorization", b"Bearer " + key)] for key in (b"right", b"wrong"))

        async def run() -> None:
            nonlocal now_s
            assert await asyncio.gather(*(upstreams.serving("b", wrong) for _ in range(9))) == [ONE] * 9
            assert len(transport.requests) == 2
            assert await upstreams.serving("b", right) == TWO
            now_s += MIN_REFRESH_S + 0.1
            served["two"].append("c")
            assert await upstreams.serving("c", wrong) is None
            assert await upstreams.serving("c", right) == TWO
            assert len(transport.requests) == 8
            for number in range(MAX_KEYS + 9):
                await upstreams.serving("d", [(b"authorization", b"%d" % number)])
            assert len(upstreams._asked_s) == MAX_KEYS

        asyncio.run(run())

    def test_while_none_answers_that_is_said(self) -> None:
        def fail(request: httpx.Request) -> httpx.Response:
            raise httpx.ConnectError("connection refused")

        app, _ = proxy(fail, ONE, TWO)
        assert get(app, "/v1/models").status == 502
        assert post(app, "/v1/messages", {"model": "x"}).status == 502

    def test_their_models_are_listed_together(self) -> None:
        app, _ = proxy(models({"one": ["a"], "two": ["b"]}), ONE, TWO)
        assert [entry["id"] for entry in get(app, "/v1/models").json()["data"]] == ["a", "b"]


class TestBounds:
    """What is too much is refused before vLLM sees it."""

    def test_of_a_body(self) -> None:
        app, transport = proxy(ok)
        answer = post(app, "/v1/messages", b"x" * 1001)
        assert answer.status == 413
        assert answer.json()["error"]["type"] == "request_too_large"
        assert transport.requests == []

    def test_of_a_body_is_answered_before_the_rest_is_read_and_discarded(self) -> None:
        """The connection was closed with a part of the body unread: its reset could reach the client first."""
        parts: list[Message] = [{"type": "http.request", "body": b"x" * 500, "more_body": n < 5} for n in range(6)]
        app, _ = proxy(ok, max_held_bytes=9000)
        answer = asyncio.run(Client(app).send("POST", "/v1/messages", parts))
        assert (answer.status, answer.headers["connection"], parts) == (413, "close", [])
        assert "retry-after" not in answer.headers

    def test_of_all_bodies_and_requests(self) -> None:
        async def many(size: int, number: int) -> list[int]:
            gate = asyncio.Event()

            async def wait(request: httpx.Request) -> httpx.Response:
                await gate.wait()
                return httpx.Response(200, stream=Parts(b"a"))

            app, _ = proxy(wait)
            tasks = [asyncio.create_task(Client(app).post("/v1/messages", b"x" * size)) for _ in range(number)]
            for _ in range(100):
                await asyncio.sleep(0)
            gate.set()
            answers = await asyncio.gather(*tasks)
            # Nothing is held any longer.
            assert (await Client(app).post("/v1/messages", b"x" * 1000)).status == 200
            return sorted(answer.status for answer in answers)

        assert asyncio.run(many(1000, 3)) == [200, 200, 503]
        assert asyncio.run(many(1, 6)) == [200, 200, 200, 200, 503, 503]

    def test_of_bodies_that_do_not_end(self) -> None:
        """They counted when they were complete: clients that stalled before the last byte held any number of bytes."""

        async def stalled() -> list[int]:
            app, _ = proxy(ok)
            tasks = []
            for _ in range(3):
                parts: list[Message] = [{"type": "http.request", "body": b"x" * 900, "more_body": True}]
                tasks.append(asyncio.create_task(Client(app).send("POST", "/v1/messages", parts)))
            done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            assert len(waiting) == 2
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            # Nothing is held any longer.
            again = [asyncio.create_task(Client(app).post("/v1/messages", b"x" * 1000)) for _ in range(2)]
            return [task.result().status for task in done] + [(await task).status for task in again]

        assert asyncio.run(stalled()) == [503, 200, 200]

    def test_of_the_time_that_a_body_takes(self) -> None:
        """A client that sent byte by byte was one of the running requests for as long as it liked."""

        async def slow() -> Response:
            app, transport = proxy(ok, body_s=0.05)

            async def receive() -> Message:
                await asyncio.sleep(0.01)
                return {"type": "http.request", "body": b"x", "more_body": True}

            sent: list[Message] = []

            async def send(message: Message) -> None:
                sent.append(message)

            scope = {"type": "http", "method": "POST", "path": "/v1/messages", "headers": [], "query_string": b""}
            await asyncio.wait_for(app(scope, receive, send), 30)
            assert transport.requests == []
            return Response(sent)

        answer = asyncio.run(slow())
        assert answer.status == 408
        assert answer.headers["connection"] == "close"
        assert answer.json()["error"]["type"] == "timeout_error"


class TestFaults:
    """A vLLM that does not answer."""

    MARKED: ClassVar[dict[str, Any]] = {
        "model": "m",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]}
        ],
    }

    @pytest.mark.parametrize(
        ("error", "status", "words"),
        [
            (httpx.ConnectError("All connection attempts failed"), 502, "no vLLM answers at http://one:8000"),
            (httpx.ConnectTimeout(""), 502, "connecttimeout"),
            (httpx.RemoteProtocolError("Server disconnected"), 502, "server disconnected"),
            (httpx.ReadTimeout(""), 504, "did not answer in time"),
        ],
    )
    @pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
    def test_is_an_error_in_the_shape_of_the_api(self, path: str, error: Exception, status: int, words: str) -> None:
        def fail(request: httpx.Request) -> httpx.Response:
            raise error

        answer = post(proxy(fail)[0], path, {})
        assert answer.status == status
        assert words in answer.json()["error"]["message"].lower().replace("vllm", "vLLM")
        assert (answer.json().get("type") == "error") == (path == "/v1/messages")

    def test_in_the_middle_of_an_answer_ends_the_connection(self) -> None:
        body = Parts(b"a", error=httpx.ReadError("reset"))
        app, _ = proxy(lambda request: httpx.Response(200, stream=body))
        with pytest.raises(CutShortError):
            post(app, "/v1/messages", {})
        assert body.is_closed

    @pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
    @pytest.mark.parametrize(("error", "status"), [(httpx.ReadError("reset"), 502), (httpx.ReadTimeout(""), 504)])
    def test_in_the_middle_of_an_answer_that_is_held_is_an_error(
        self, path: str, error: Exception, status: int
    ) -> None:
        """It was uvicorn's 500 in plain text: of an answer whose usage is rewritten nothing was sent yet."""

        def handler(request: httpx.Request) -> httpx.Response:
            headers = {"content-type": "application/json", "content-length": "500"}
            return httpx.Response(200, headers=headers, stream=Parts(b'{"usage":', error=error))

        app, _ = proxy(handler)
        answer = post(PromptCaching(app, MarkerSettings()), path, self.MARKED)
        assert answer.status == status
        assert "in the middle of its answer" in answer.json()["error"]["message"]
        assert (answer.json().get("type") == "error") == (path == "/v1/messages")

    def test_in_the_middle_of_a_rendering_is_asked_again_with_the_next_request(self) -> None:
        """It counted as a conversation that vLLM refuses: no pin for a minute."""
        renders: list[str] = []

        def handler(request: httpx.Request) -> httpx.Response:
            if not request.url.path.endswith("/render"):
                return streamed({})
            renders.append(request.url.path)
            return httpx.Response(200, stream=Parts(b'{"token_ids":', error=httpx.ReadError("reset")))

        app = PromptCaching(proxy(handler)[0], MarkerSettings())
        for _ in range(2):
            assert post(app, "/v1/messages", self.MARKED).status == 200
        assert len(renders) == 4

    def test_of_a_body_that_is_too_large_to_render_is_said(self, caplog: pytest.LogCaptureFixture) -> None:
        """It counted as a conversation that vLLM refuses, and the log said nothing."""
        transport = Transport(ok)
        inner = ReverseProxy(Upstreams((ONE,), transport), transport, max_body_bytes=1000, timeouts=httpx.Timeout(5))
        marked = PromptCaching(inner, MarkerSettings())
        app = RequestBounds(marked, max_requests=4, max_held_bytes=9000)
        assert post(app, "/v1/messages", self.MARKED | {"system": "x" * 1000}).status == 413
        assert "more than 1000 bytes (--max-body)" in caplog.text
        assert not marked._boundaries._found

    def test_in_the_middle_of_a_marked_stream_ends_the_connection(self) -> None:
        body = Parts(b"data: {}\n\n", error=httpx.ReadError("reset"))
        headers = {"content-type": "text/event-stream"}
        app, _ = proxy(lambda request: httpx.Response(200, headers=headers, stream=body))
        with pytest.raises(CutShortError):
            post(PromptCaching(app, MarkerSettings()), "/v1/messages", self.MARKED | {"stream": True})


class TestServer:
    """Health, start and stop."""

    def test_health_says_which_vllm_answers(self) -> None:
        def handler(request: httpx.Request) -> httpx.Response:
            if request.url.host == "two":
                raise httpx.ConnectError("no")
            return httpx.Response(200, stream=Parts(b""))

        answer = get(proxy(handler, ONE, TWO)[0], "/health")
        assert answer.status == 200
        shown = [{"url": str(ONE), "healthy": True}, {"url": str(TWO), "healthy": False}]
        assert answer.json() == {"status": "ok", "upstreams": shown}
        assert get(proxy(handler, TWO)[0], "/health").status == 503
        assert get(proxy(handler, TWO)[0], "/health/live").status == 200

    def test_many_that_ask_for_health_at_once_are_one_check(self) -> None:
        """Each asked every vLLM, without a bound: these connections are those of the requests."""

        async def many() -> list[int]:
            gate = asyncio.Event()

            async def wait(request: httpx.Request) -> httpx.Response:
                await gate.wait()
                return httpx.Response(200, stream=Parts(b""))

            app, transport = proxy(wait, ONE, TWO)
            asking = [asyncio.create_task(Client(app).send("GET", "/health", [])) for _ in range(100)]
            for _ in range(10):
                await asyncio.sleep(0)
            asking[0].cancel()  # who leaves does not end it for the others
            gate.set()
            assert {answer.status for answer in await asyncio.gather(*asking[1:])} == {200}
            assert len(transport.requests) == 2
            assert (await Client(app).send("GET", "/health", [])).status == 200
            return [len(transport.requests)]

        assert asyncio.run(many()) == [4]

    def test_stopping_closes_the_connections(self) -> None:
        app, transport = proxy(ok)
        sent: list[Message] = []

        async def live() -> None:
            messages: list[Message] = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]

            async def receive() -> Message:
                return messages.pop(0)

            async def send(message: Message) -> None:
                sent.append(message)

            await app({"type": "lifespan"}, receive, send)

        asyncio.run(live())
        assert [message["type"] for message in sent] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
        assert transport.is_closed

    def test_json_of_an_error_is_valid_whatever_the_model_is_called(self) -> None:
        app, _ = proxy(models({"one": [], "two": []}), ONE, TWO)
        answer = post(app, "/v1/messages", json.dumps({"model": '"\ud800\n'}).encode())
        assert answer.status == 404
        assert answer.json()["type"] == "error"
