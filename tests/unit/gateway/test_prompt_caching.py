"""The app: what passes unchanged, what reaches vLLM of a marked request, and which usage comes back."""

import asyncio
import json
from typing import Any

import pytest

from kvtier.gateway import PromptCaching
from kvtier.gateway.gateway_settings import MarkerSettings
from kvtier.gateway.owners import owner_of
from tests.unit.gateway.vllm_app import Client, Response, VllmApp

Json = dict[str, Any]
EPHEMERAL = {"type": "ephemeral"}
KEY = {"authorization": "Bearer secret"}
OWNER = owner_of([(b"authorization", b"Bearer secret")])
SYSTEM = "you are a helpful clerk of the county"
NUM_SYSTEM = 1 + len(SYSTEM.split()) + 1  # with the openings of the system's and of the user's turn


def messages_request(question: str = "what is open", **more: Any) -> Json:
    """Return a request whose system prompt is marked."""
    system = [{"type": "text", "text": SYSTEM, "cache_control": EPHEMERAL}]
    turns = [{"role": "user", "content": question}]
    return {"model": "m", "max_tokens": 9, "system": system, "messages": turns, **more}


def post(app: Any, path: str, body: Any, headers: Json | None = None, **how: Any) -> Response:
    """Send one request."""
    return asyncio.run(Client(app, **(KEY if headers is None else headers)).post(path, body, **how))


class TestUnmarked:
    """Requests without markers."""

    @pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/responses"])
    @pytest.mark.parametrize("stream", [False, True])
    def test_pass_byte_for_byte_in_both_directions(self, path: str, stream: bool) -> None:
        body = json.dumps({"messages": [], "input": [], "stream": stream}, indent=3).encode() + b" \n"
        alone, inner = VllmApp(), VllmApp()
        expected = post(alone, path, body)
        answer = post(PromptCaching(inner), path, body, parts=3)
        assert inner.bodies == [body]
        assert (answer.status, answer.headers, answer.parts) == (expected.status, expected.headers, expected.parts)

    def test_of_other_paths_pass_whatever_they_are(self) -> None:
        body = b'{"cache_control": broken'
        inner = VllmApp()
        assert post(PromptCaching(inner), "/v1/completions", body).json()["num_bytes"] == len(body)

    def test_that_are_no_json_are_left_to_vllm(self) -> None:
        async def refuses(scope: Any, receive: Any, send: Any) -> None:
            message = await receive()
            await send({"type": "http.response.start", "status": 400, "headers": []})
            await send({"type": "http.response.body", "body": message["body"]})

        body = b'{"cache_control": '
        answer = post(PromptCaching(refuses), "/v1/messages", body)
        assert (answer.status, answer.body) == (400, body)

    def test_that_are_compressed_are_left_to_vllm(self) -> None:
        body = json.dumps(messages_request()).encode()
        inner = VllmApp()
        post(PromptCaching(inner), "/v1/messages", body, KEY | {"content_encoding": "gzip"})
        assert inner.bodies == [body]

    def test_beyond_the_bound_pass_unread(self) -> None:
        body = json.dumps(messages_request(question="why " * 1000)).encode()
        inner = VllmApp()
        app = PromptCaching(inner, MarkerSettings(max_body_bytes=2000))
        post(app, "/v1/messages", body, parts=5)
        assert inner.bodies == [body]
        assert inner.num_renders == 0

    def test_beyond_the_bound_that_announce_no_length_pass_too(self) -> None:
        inner = VllmApp()
        app = PromptCaching(inner, MarkerSettings(max_body_bytes=2000))
        parts: list[Any] = [{"type": "http.request", "body": b'{"messages": [], "x": "', "more_body": True}]
        parts += [{"type": "http.request", "body": b"y" * 1500, "more_body": True} for _ in range(3)]
        parts.append({"type": "http.request", "body": b'"}', "more_body": False})
        asyncio.run(Client(app).send("POST", "/v1/messages", parts))
        assert len(inner.last["x"]) == 4500


class TestInstruction:
    """What reaches vLLM, and so the connector."""

    def test_names_the_breakpoints_in_tokens_with_their_ttl_and_the_owner(self) -> None:
        inner = VllmApp()
        post(PromptCaching(inner), "/v1/messages", messages_request())
        expected = {"breakpoints": [{"num_tokens": NUM_SYSTEM, "ttl_s": 300}], "owner": OWNER}
        assert inner.last["kv_transfer_params"] == {"kvtier": expected}
        assert "cache_control" not in json.dumps(inner.last)

    def test_comes_beside_what_the_client_sent(self) -> None:
        inner = VllmApp()
        params = {"kv_load_tiers": ["cpu"], "kvtier": {"priority": -3, "owner": "someone else"}}
        post(PromptCaching(inner), "/v1/messages", messages_request(kv_transfer_params=params))
        sent = inner.last["kv_transfer_params"]
        assert sent["kv_load_tiers"] == ["cpu"]
        assert sent["kvtier"]["priority"] == -3
        assert sent["kvtier"]["owner"] == OWNER

    def test_is_not_added_without_a_key(self) -> None:
        inner = VllmApp()
        answer = post(PromptCaching(inner), "/v1/messages", messages_request(), {})
        assert "kv_transfer_params" not in inner.last
        assert answer.json()["usage"]["cache_creation_input_tokens"] == 0

    def test_has_the_owner_of_a_trusted_header(self) -> None:
        inner = VllmApp()
        app = PromptCaching(inner, MarkerSettings(owner_header="x-tenant"))
        post(app, "/v1/messages", messages_request(), KEY | {"x_tenant": "blue"})
        assert inner.last["kv_transfer_params"]["kvtier"]["owner"] == owner_of([(b"x-tenant", b"blue")], "x-tenant")

    def test_of_a_client_gets_the_owner_without_markers_too(self) -> None:
        inner = VllmApp()
        body: Json = {"messages": [], "kv_transfer_params": {"kvtier": {"pin": "clerk"}}}
        post(PromptCaching(inner), "/v1/chat/completions", body)
        assert inner.last == body | {"kv_transfer_params": {"kvtier": {"pin": "clerk", "owner": OWNER}}}

    def test_a_refused_boundary_is_left_out_and_the_request_is_answered(self) -> None:
        inner = VllmApp()
        inner.refused_text = "quokkas"
        answer = post(PromptCaching(inner), "/v1/messages", messages_request())
        assert answer.status == 200
        assert "kv_transfer_params" not in inner.last
        assert answer.json()["usage"]["cache_creation_input_tokens"] == 0

    def test_a_caller_that_vllm_refuses_has_nothing_rendered(self) -> None:
        inner = VllmApp(api_key="right")
        answer = post(PromptCaching(inner), "/v1/messages", messages_request())
        assert (answer.status, answer.json()) == (401, {"error": "Unauthorized"})
        assert inner.num_renders == 0

    def test_without_render_endpoints_requests_pass_and_the_log_names_the_flag(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        inner = VllmApp(has_render=False)
        app = PromptCaching(inner)
        assert post(app, "/v1/messages", messages_request()).status == 200
        assert post(app, "/v1/messages", messages_request()).status == 200
        assert sum("start it with --enable-scale-out" in record.getMessage() for record in caplog.records) == 1


class TestUsage:
    """What clients see of the cache."""

    def test_is_written_first_and_read_afterwards(self) -> None:
        app = PromptCaching(VllmApp())
        first = post(app, "/v1/messages", messages_request()).json()["usage"]
        second = post(app, "/v1/messages", messages_request("who is there")).json()["usage"]
        assert first == {
            "input_tokens": 4,
            "output_tokens": 3,
            "cache_creation_input_tokens": NUM_SYSTEM,
            "cache_read_input_tokens": 0,
            "cache_creation": {"ephemeral_5m_input_tokens": NUM_SYSTEM, "ephemeral_1h_input_tokens": 0},
        }
        assert second["cache_read_input_tokens"] == NUM_SYSTEM
        assert second["cache_creation_input_tokens"] == 0
        assert second["input_tokens"] == 4

    def test_a_second_request_with_the_same_prompt_renders_nothing(self) -> None:
        inner = VllmApp()
        app = PromptCaching(inner)
        post(app, "/v1/messages", messages_request())
        before = inner.num_renders
        post(app, "/v1/messages", messages_request("who is there", temperature=0.3))
        assert before == 2
        assert inner.num_renders == before

    def test_in_a_stream_comes_with_the_last_event_and_no_part_waits_for_another(self) -> None:
        inner = VllmApp()
        plain = post(VllmApp(), "/v1/messages", messages_request(stream=True))
        answer = post(PromptCaching(inner), "/v1/messages", messages_request(stream=True))
        assert len(answer.parts) == len(plain.parts)
        delta = next(event for event in answer.events() if event["type"] == "message_delta")
        assert delta["usage"]["cache_creation_input_tokens"] == NUM_SYSTEM
        assert delta["usage"]["cache_creation"]["ephemeral_5m_input_tokens"] == NUM_SYSTEM
        # Not known yet, so not claimed.
        assert "cache_read_input_tokens" not in answer.events()[0]["message"]["usage"]

    def test_of_chat_has_the_written_tokens_too_and_anthropics_names_where_its_marker_was_used(self) -> None:
        app = PromptCaching(VllmApp())
        parts = [{"type": "text", "text": SYSTEM, "cache_control": EPHEMERAL}]
        turns = [{"role": "system", "content": parts}, {"role": "user", "content": "what is open"}]
        body = {"model": "m", "messages": turns, "stream": True, "stream_options": {"include_usage": True}}
        usage = post(app, "/v1/chat/completions", body).events()[-1]["usage"]
        num_tokens = NUM_SYSTEM + 1  # this template opens the system's turn twice
        assert usage["prompt_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": num_tokens}
        assert usage["cache_creation_input_tokens"] == num_tokens
        usage = post(app, "/v1/chat/completions", body | {"stream": False}).json()["usage"]
        assert usage["cache_read_input_tokens"] == num_tokens
        assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1

    def test_of_several_answers_in_one_body_is_not_known(self, caplog: pytest.LogCaptureFixture) -> None:
        """vLLM reports the count of the last one, which read what the first one computed: all read, nothing written."""
        inner = VllmApp()
        inner.report = {"result": "pinned", "cached_tokens": {"device": 32}}
        app = PromptCaching(inner)
        parts = [{"type": "text", "text": SYSTEM, "cache_control": EPHEMERAL}]
        turns = [{"role": "system", "content": parts}, {"role": "user", "content": "what is open"}]
        for _ in range(2):
            answer = post(app, "/v1/chat/completions", {"model": "m", "messages": turns, "n": 2})
            usage = answer.json()["usage"]
            assert usage["prompt_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
            assert usage["cache_creation_input_tokens"] == usage["cache_read_input_tokens"] == 0
            assert "kvtier-cached-tokens" not in answer.headers
        assert inner.last["kv_transfer_params"]["kvtier"]["breakpoints"]
        assert not caplog.records
        one = post(app, "/v1/chat/completions", {"model": "m", "messages": turns, "n": 1}).json()["usage"]
        assert one["cache_read_input_tokens"] > 0

    def test_of_responses_splits_by_its_own_lifetimes(self) -> None:
        app = PromptCaching(VllmApp())
        body = {"input": "what is open", "instructions": SYSTEM, "prompt_cache_key": "clerk", "stream": True}
        usage = post(app, "/v1/responses", body).events()[-1]["response"]["usage"]
        written = NUM_SYSTEM + 3
        assert usage["input_tokens_details"] == {
            "cached_tokens": 0,
            "cache_write_tokens": written,
            "cache_write_tokens_details": {"ttl_30m_tokens": written, "ttl_12h_tokens": 0},
        }

    def test_says_zero_when_vllm_does_not_report_it_and_the_log_names_the_flag(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        app = PromptCaching(VllmApp(has_details=False))
        for _ in range(2):
            usage = post(app, "/v1/messages", messages_request()).json()["usage"]
            assert usage["cache_read_input_tokens"] == usage["cache_creation_input_tokens"] == 0
            assert usage["input_tokens"] == NUM_SYSTEM + 4
        assert sum("--enable-prompt-tokens-details" in record.getMessage() for record in caplog.records) == 1

    @pytest.mark.parametrize("result", ["unanswered", "refused", "too_short"])
    def test_says_that_nothing_is_written_when_nothing_is_kept(self, result: str) -> None:
        inner = VllmApp()
        inner.report = {"result": result, "cached_tokens": {}}
        usage = post(PromptCaching(inner), "/v1/messages", messages_request()).json()["usage"]
        assert usage["cache_creation_input_tokens"] == usage["cache_creation"]["ephemeral_5m_input_tokens"] == 0
        assert usage["input_tokens"] == NUM_SYSTEM + 4

    def test_in_a_stream_says_zero_as_long_as_the_daemon_is_away(self) -> None:
        inner = VllmApp()
        app = PromptCaching(inner)

        def written(*, stream: bool) -> int:
            system = [{"type": "text", "text": f"{len(inner.bodies)} {SYSTEM}", "cache_control": EPHEMERAL}]
            answer = post(app, "/v1/messages", messages_request(system=system, stream=stream))
            events = answer.events() if stream else [answer.json()]
            usage = next(event["usage"] for event in events if "usage" in event)
            return int(usage["cache_creation_input_tokens"])

        inner.report = {"result": "unanswered", "cached_tokens": {}}
        assert written(stream=False) == written(stream=True) == 0
        inner.report = {"result": "waiting", "cached_tokens": {}}
        first = written(stream=False)
        assert first >= NUM_SYSTEM
        assert written(stream=True) == first

    def test_in_a_stream_says_what_is_written_where_only_an_adapter_has_no_answer(self) -> None:
        """The requests of one client, whose adapter the connector could not read, were all clients' daemon away."""
        inner = VllmApp()
        app = PromptCaching(inner)
        inner.report = {"result": "unanswered", "cached_tokens": {}}
        post(app, "/v1/messages", messages_request(model="adapter"))
        written = []
        for model in ("m", "adapter"):
            system = [{"type": "text", "text": f"{model} {SYSTEM}", "cache_control": EPHEMERAL}]
            events = post(app, "/v1/messages", messages_request(model=model, system=system, stream=True)).events()
            usage = next(event["usage"] for event in events if "usage" in event)
            written.append(usage["cache_creation_input_tokens"] > 0)
        assert written == [True, False]

    def test_in_a_stream_says_what_is_written_when_the_daemon_is_back_while_an_older_stream_ends(self) -> None:
        """The old stream, which has no report, brought back what it had begun with: 0 for all further streams."""
        inner = VllmApp()
        app = PromptCaching(inner)

        async def run() -> list[int]:
            gate, client = asyncio.Event(), Client(app, **KEY)

            async def written(system_text: str, *, stream: bool) -> int:
                system = [{"type": "text", "text": system_text, "cache_control": EPHEMERAL}]
                answer = await client.post("/v1/messages", messages_request(system=system, stream=stream))
                events = answer.events() if stream else [answer.json()]
                usage = next(event["usage"] for event in events if "usage" in event)
                return int(usage["cache_creation_input_tokens"])

            inner.report = {"result": "unanswered", "cached_tokens": {}}
            counts = [await written("a " + SYSTEM, stream=False)]
            inner.stream_gate = gate
            old = asyncio.create_task(written("b " + SYSTEM, stream=True))
            await inner.is_streaming.wait()
            inner.report = {"result": "waiting", "cached_tokens": {}}
            counts.append(await written("c " + SYSTEM, stream=False))
            gate.set()
            counts.append(await old)
            return [*counts, await written("d " + SYSTEM, stream=True)]

        assert asyncio.run(run()) == [0, NUM_SYSTEM, 0, NUM_SYSTEM]  # each but for the first has read its opening

    def test_has_a_header_with_the_sources(self) -> None:
        inner = VllmApp()
        inner.report = {"result": "pinned", "cached_tokens": {"device": 32, "host": 1184}}
        app = PromptCaching(inner)
        answer = post(app, "/v1/messages", messages_request())
        assert answer.headers["kvtier-cached-tokens"] == "device=32, host=1184"
        inner.report = {"result": "pinned", "cached_tokens": {}}
        assert post(app, "/v1/messages", messages_request()).headers["kvtier-cached-tokens"] == "device=0"
        assert "kvtier-cached-tokens" not in post(app, "/v1/messages", messages_request(), headers={}).headers
        assert "kvtier-cached-tokens" not in post(PromptCaching(VllmApp()), "/v1/messages", messages_request()).headers

    def test_of_max_tokens_0_is_that_of_a_prompt_without_an_answer(self) -> None:
        inner = VllmApp()
        answer = post(PromptCaching(inner), "/v1/messages", messages_request(max_tokens=0)).json()
        assert inner.last["max_tokens"] == 1
        assert (answer["content"], answer["stop_reason"]) == ([], "max_tokens")
        assert answer["usage"]["output_tokens"] == 0
        assert answer["usage"]["cache_creation_input_tokens"] == NUM_SYSTEM

    def test_of_a_prewarmed_response_likewise(self) -> None:
        inner = VllmApp()
        body = {"input": "what is open", "prompt_cache_options": {"prewarm": True}}
        answer = post(PromptCaching(inner), "/v1/responses", body).json()
        assert inner.last["max_output_tokens"] == 1
        assert (answer["output"], answer["status"], answer["usage"]["output_tokens"]) == ([], "completed", 0)


class Connection:
    """Of a client that stays until it leaves."""

    def __init__(self, body: Json) -> None:
        self._parts = [{"type": "http.request", "body": json.dumps(body).encode()}]
        self.has_left = asyncio.Event()
        self.sent: list[Any] = []

    async def request(self, app: Any) -> None:
        headers = [(b"authorization", b"Bearer secret")]
        scope = {"type": "http", "method": "POST", "path": "/v1/messages", "headers": headers, "query_string": b""}
        await asyncio.wait_for(app(scope, self._receive, self._send), 30)

    async def _receive(self) -> Any:
        if self._parts:
            return self._parts.pop()
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)


class TestLeaving:
    """Clients that do not wait for their answer."""

    def test_while_markers_are_located_ends_the_search(self) -> None:
        """vLLM rendered for ten seconds more, in one of four places, and answered no one."""

        async def run() -> tuple[int, list[Any]]:
            client, num_ended = Connection(messages_request()), 0

            async def inner(scope: Any, receive: Any, send: Any) -> None:
                nonlocal num_ended
                assert scope["path"].endswith("/render")
                client.has_left.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    num_ended += 1

            await client.request(PromptCaching(inner))
            return num_ended, client.sent

        assert asyncio.run(run()) == (2, [])

    def test_is_not_asked_of_an_app_that_gives_its_body_each_time(self) -> None:
        """A middleware that has read the body does that: the event loop went round for ever, and served no one."""
        num_asked, sent = 0, []

        async def receive() -> Any:
            nonlocal num_asked
            num_asked += 1
            assert num_asked < 100
            return {"type": "http.request", "body": json.dumps(messages_request()).encode()}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"authorization", b"Bearer secret")]
        scope = {"type": "http", "method": "POST", "path": "/v1/messages", "headers": headers, "query_string": b""}
        asyncio.run(asyncio.wait_for(PromptCaching(VllmApp())(scope, receive, send), 30))
        usage = Response(sent).json()["usage"]
        assert usage["cache_creation_input_tokens"] == NUM_SYSTEM

    def test_later_is_noticed_by_vllm(self) -> None:
        async def run() -> bool:
            client, vllm, has_noticed = Connection(messages_request()), VllmApp(), False

            async def inner(scope: Any, receive: Any, send: Any) -> None:
                nonlocal has_noticed
                if scope["path"].endswith("/render"):
                    await vllm(scope, receive, send)
                    return
                assert (await receive())["type"] == "http.request"
                client.has_left.set()
                has_noticed = (await receive())["type"] == "http.disconnect"

            await client.request(PromptCaching(inner))
            return has_noticed

        assert asyncio.run(run())


class TestWrongMarkers:
    """They are answered as the hosted APIs do, and never reach vLLM."""

    def test_in_anthropics_shape(self) -> None:
        inner = VllmApp()
        system = [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "2h"}}]
        answer = post(PromptCaching(inner), "/v1/messages", messages_request() | {"system": system})
        problem = "system.0.cache_control.ttl: Input should be '5m' or '1h'"
        assert answer.status == 400
        assert answer.json() == {"type": "error", "error": {"type": "invalid_request_error", "message": problem}}
        assert inner.bodies == []

    def test_in_openais_shape(self) -> None:
        inner = VllmApp()
        options = {"ttl": "1h"}
        answer = post(PromptCaching(inner), "/v1/responses", {"input": "x", "prompt_cache_options": options})
        assert answer.status == 400
        assert answer.json()["error"] == {
            "message": "Invalid value: '1h'. Supported values are: '30m' and '12h'.",
            "type": "invalid_request_error",
            "param": "prompt_cache_options.ttl",
            "code": "invalid_value",
        }
        assert inner.bodies == []


class TestInstructions:
    """What a client itself asks of kvtier, in `kv_transfer_params`."""

    @staticmethod
    def request(own: Any, **more: Any) -> Json:
        turns = [{"role": "user", "content": "hello"}]
        return {"model": "m", "messages": turns, "kv_transfer_params": {"other": 1, "kvtier": own}, **more}

    def test_reach_vllm_in_the_name_of_the_caller(self) -> None:
        inner = VllmApp()
        post(PromptCaching(inner), "/v1/chat/completions", self.request({"pin": True, "owner": "f" * 16}))
        params = json.loads(inner.bodies[-1])["kv_transfer_params"]
        assert params == {"other": 1, "kvtier": {"pin": True, "owner": OWNER}}
        post(PromptCaching(inner), "/v1/chat/completions", self.request({"pin": True, "owner": "f" * 16}), headers={})
        assert json.loads(inner.bodies[-1])["kv_transfer_params"]["kvtier"] == {"pin": True}

    @pytest.mark.parametrize("own", [5, {"pin": 7}, {"pinned": True}, {"pin": True, "no_store": True}, {"ttl": "1h"}])
    def test_that_cannot_be_are_refused_by_field(self, own: Any) -> None:
        inner = VllmApp()
        answer = post(PromptCaching(inner), "/v1/chat/completions", self.request(own))
        assert answer.status == 400
        assert answer.json()["error"]["param"].startswith("kv_transfer_params.kvtier")
        assert not inner.bodies

    def test_go_with_markers(self) -> None:
        inner = VllmApp()
        body = messages_request(kv_transfer_params={"kvtier": {"pin": "clerk", "priority": -3}})
        post(PromptCaching(inner), "/v1/messages", body)
        own = json.loads(inner.bodies[-1])["kv_transfer_params"]["kvtier"]
        assert (own["pin"], own["priority"], own["owner"]) == ("clerk", -3, OWNER)
        assert own["breakpoints"] == [{"num_tokens": NUM_SYSTEM, "ttl_s": 300}]
