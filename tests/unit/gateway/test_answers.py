"""Usage in answers: rewritten where it is complete, and everything else passes as vLLM wrote it."""

import asyncio
import json
from typing import Any

import pytest

from kvtier.gateway import answers
from kvtier.gateway.answers import RewritingSend
from kvtier.gateway.asgi import Message
from kvtier.gateway.markers.marked_request import Api
from kvtier.gateway.usage_numbers import MarkedPlace, UsageWriter, count

STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"content-length", b"9")]
JSON = [(b"Content-Type", b"application/json"), (b"content-length", b"9")]


def writer(api: Api = Api.CHAT, **fields: Any) -> UsageWriter:
    """Return a writer for a prompt of 40 marked tokens."""
    settings: Any = {"points": [MarkedPlace(40, 300)], "is_kept": True, "has_cache_control": False, "is_prewarm": False}
    return UsageWriter(api=api, **(settings | fields))


def pass_through(usage: UsageWriter, headers: Any, *parts: bytes, status: int = 200) -> list[Message]:
    """Send an answer through, and return what the client gets."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def run() -> None:
        rewriting = RewritingSend(send, usage)
        await rewriting({"type": "http.response.start", "status": status, "headers": headers})
        for index, part in enumerate(parts):
            more = index < len(parts) - 1
            await rewriting({"type": "http.response.body", "body": part, "more_body": more})

    asyncio.run(run())
    return sent


def body_of(sent: list[Message]) -> bytes:
    """Return the whole body."""
    return b"".join(message["body"] for message in sent[1:])


class TestCounts:
    """Numbers of a request with breakpoints."""

    POINTS = (MarkedPlace(100, 3600), MarkedPlace(250, 3600), MarkedPlace(400, 300))

    @pytest.mark.parametrize(
        ("cached", "read", "long", "short"),
        [(0, 0, 250, 150), (64, 64, 186, 150), (250, 250, 0, 150), (320, 320, 0, 80), (400, 400, 0, 0)],
    )
    def test_what_is_written_is_split_by_ttl(self, cached: int, read: int, long: int, short: int) -> None:
        counts = count(self.POINTS, cached, is_kept=True)
        assert (counts.read, counts.written) == (read, long + short)
        assert counts.written_by_ttl == {3600: long, 300: short}

    def test_what_lies_behind_the_last_breakpoint_is_not_read(self) -> None:
        assert count(self.POINTS, 450, is_kept=True).read == 400

    def test_nothing_is_written_for_no_one(self) -> None:
        assert count(self.POINTS, 64, is_kept=False) == (64, 0, {})
        assert count((), 64, is_kept=True) == (0, 0, {})

    def test_a_count_of_the_engine_comes_before_vllms_usage(self) -> None:
        usage = writer(Api.MESSAGES, measured_tokens=32).write({"input_tokens": 50, "output_tokens": 1})
        assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (32, 8)
        assert usage["input_tokens"] == 10

    def test_vllms_own_split_is_undone(self) -> None:
        theirs = {"input_tokens": 2, "cache_read_input_tokens": 16, "cache_creation_input_tokens": 32}
        usage = writer(Api.MESSAGES).write(theirs)
        assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (16, 24)
        assert usage["input_tokens"] == 10


class TestBodies:
    """Answers that are no streams."""

    def test_come_whole_with_their_new_length(self) -> None:
        answer = json.dumps({"text": "é", "usage": {"prompt_tokens": 50}}).encode()
        sent = pass_through(writer(measured_tokens=32), JSON, answer[:20], answer[20:])
        usage = json.loads(body_of(sent))["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 32, "cache_write_tokens": 8}
        assert dict(sent[0]["headers"])[b"content-length"] == str(len(body_of(sent))).encode()

    @pytest.mark.parametrize("answer", [b'{"usage": 5}', b"[1]", b"not json", b"", b'{"usage": null}'])
    def test_that_are_no_answers_of_the_api_pass(self, answer: bytes) -> None:
        assert body_of(pass_through(writer(), JSON, answer)) == answer

    def test_of_errors_pass_as_they_come(self) -> None:
        sent = pass_through(writer(), JSON, b'{"usage": {}', b"}", status=404)
        assert [message["body"] for message in sent[1:]] == [b'{"usage": {}', b"}"]
        assert sent[0]["headers"] == JSON

    def test_that_are_compressed_pass(self) -> None:
        headers = [*JSON, (b"content-encoding", b"gzip")]
        assert pass_through(writer(), headers, b'{"usage": {}}')[0]["headers"] == headers

    def test_that_are_too_long_pass(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(answers, "MAX_BODY_BYTES", 10)
        parts = [b'{"usage": {}, "x": 1', b"2", b"}"]
        sent = pass_through(writer(), JSON, *parts)
        assert body_of(sent) == b"".join(parts)
        assert sent[0]["headers"] == JSON


class TestStreams:
    """Events pass as soon as they are complete."""

    USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":50}}\n\n'

    def test_an_event_waits_for_its_end_only(self) -> None:
        word = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
        sent = pass_through(writer(measured_tokens=0), STREAM, word, word + self.USAGE[:9], self.USAGE[9:], b"")
        assert [message["body"] for message in sent[1:3]] == [word, word]
        assert b'"cache_write_tokens":40' in sent[3]["body"]
        assert b"content-length" not in dict(sent[0]["headers"])

    def test_usage_of_single_tokens_is_left(self) -> None:
        event = b'data: {"choices":[{"delta":{}}],"usage":{"prompt_tokens":50}}\n\n'
        assert body_of(pass_through(writer(), STREAM, event, b"")) == event

    def test_text_that_speaks_of_usage_is_left(self) -> None:
        event = b'data: {"type": "content_block_delta", "delta": {"text": "the \\"usage\\" of"}, "usage": 1}\n\n'
        assert body_of(pass_through(writer(Api.MESSAGES), STREAM, event, b"")) == event

    def test_the_first_event_is_written_when_the_engine_has_counted(self) -> None:
        start = b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":50}}}\n\n'
        assert body_of(pass_through(writer(Api.MESSAGES), STREAM, start, b"")) == start
        sent = body_of(pass_through(writer(Api.MESSAGES, measured_tokens=32), STREAM, start, b""))
        assert sent.startswith(b"event: message_start\ndata: ")
        assert b'"cache_read_input_tokens":32' in sent

    def test_a_stream_that_ends_without_an_empty_line_loses_nothing(self) -> None:
        assert body_of(pass_through(writer(), STREAM, b"data: a\n\ndata: b", b"")) == b"data: a\n\ndata: b"

    def test_other_line_ends_are_not_waited_for(self) -> None:
        sent = pass_through(writer(), STREAM, b"data: a\r\n\r\n", b"data: b\r\n\r\n", b"")
        assert [message["body"] for message in sent[1:3]] == [b"data: a\r\n\r\n", b"data: b\r\n\r\n"]

    def test_an_event_without_end_is_not_held_for_ever(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(answers, "MAX_EVENT_BYTES", 10)
        sent = pass_through(writer(), STREAM, b"data: " + b"a" * 20, b"b", b"")
        assert sent[1]["body"] == b"data: " + b"a" * 20
