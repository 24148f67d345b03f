"""A daemon and a vLLM that answer with text that a terminal would obey, in every field that holds text."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvtier._pb import cache_pb2
from tests.unit.cli.fake_vllm import FakeVllm

# Title (OSC), colour (CSI) and its one-character form (C1), bidi override and isolate, DEL, line ends of every kind, an
# invisible tag, then markup of rich that closes what was never opened, and an emoji's name.
HOSTILE = "evil\x1b]0;owned\x07\x1b[31m\x9b32m\u202egnp.\u2066\x7f\r\nINJECTED\u2028INJECTED\x85INJECTED\U000e0041"
HOSTILE += "[/red][b]:skull:"
_SERVICE = cache_pb2.DESCRIPTOR.services_by_name["CacheService"]


def fill(message: Message, text: str, number: float = 1) -> Message:
    """Set every field, of every message in it too: text, numbers, and one element of what is repeated."""
    for each in message.DESCRIPTOR.fields:
        if "page" in each.name or (each.containing_oneof and each is not each.containing_oneof.fields[0]):
            continue  # a list of pages would never end
        value = getattr(message, each.name)
        if each.message_type and each.message_type.GetOptions().map_entry:
            value[text] = text if each.message_type.fields_by_name["value"].type == each.TYPE_STRING else 1
        elif each.message_type:
            fill(value.add() if each.is_repeated else value, text, number)
        elif each.is_repeated:
            value.append(_scalar(each, text, number))
        else:
            setattr(message, each.name, _scalar(each, text, number))
    return message


def _scalar(each: Any, text: str, number: float) -> Any:
    if each.type == each.TYPE_STRING:
        return text
    if each.type == each.TYPE_BYTES:
        return text.encode()
    if each.type in (each.TYPE_DOUBLE, each.TYPE_FLOAT):
        return number
    return True if each.type == each.TYPE_BOOL else 1


@dataclass
class HostileDaemon:
    """Its knobs.

    Attributes:
        text: In every string of every answer.
        number: In every float.
        refusal: Abort every call with it, if given.
        overrides: Fields of every PromptStatus.
        error_kind: Name of the error's class that a refusal names.
    """

    text: str = HOSTILE
    number: float = 1.0
    refusal: str = ""
    error_kind: str = ""
    overrides: dict[str, Any] = field(default_factory=dict)

    def answer(self, method: Any, context: grpc.ServicerContext) -> Message:
        """Return an answer of the method's type."""
        if self.refusal:
            context.set_trailing_metadata((("kvtier-error", self.error_kind),))
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refusal)
        message = fill(GetMessageClass(method.output_type)(), self.text, self.number)
        for status in _prompts_in(message):
            for name, value in self.overrides.items():
                setattr(status, name, value)
        return message


def _prompts_in(message: Message) -> list[cache_pb2.PromptStatus]:
    if isinstance(message, cache_pb2.PromptStatus):
        return [message]
    return [status for status in getattr(message, "prompts", ()) if isinstance(status, cache_pb2.PromptStatus)]


@contextmanager
def serving(daemon: HostileDaemon, socket: Path) -> Iterator[HostileDaemon]:
    """Serve every method of CacheService, whatever there is."""
    handlers = {method.name: _handler(daemon, method) for method in _SERVICE.methods}
    server = grpc.server(ThreadPoolExecutor(max_workers=8))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE.full_name, handlers),))
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    try:
        yield daemon
    finally:
        server.stop(0).wait()


def _handler(daemon: HostileDaemon, method: Any) -> Any:
    def one(request: Any, context: grpc.ServicerContext) -> Message:
        if method.client_streaming:
            list(request)
        return daemon.answer(method, context)

    def stream(request: Any, context: grpc.ServicerContext) -> Iterator[Message]:
        yield one(request, context)

    coding: dict[str, Any] = {
        "request_deserializer": GetMessageClass(method.input_type).FromString,
        "response_serializer": GetMessageClass(method.output_type).SerializeToString,
    }
    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler(stream, **coding)
    kind = grpc.stream_unary_rpc_method_handler if method.client_streaming else grpc.unary_unary_rpc_method_handler
    return kind(one, **coding)


class HostileVllm(FakeVllm):
    """Gives the same answer to everything: its models, version, text and metrics are hostile, or its error is."""

    status = 200

    def answer(self, path: str, body: dict[str, Any], authorization: str) -> tuple[int, dict[str, Any] | str]:
        """Return status and JSON, or text."""
        if path == "/metrics":
            lines = (f'vllm:cache_config_info{{block_size="{HOSTILE}",enable_prefix_caching="{HOSTILE}"}} 1',)
            return 200, "\n".join(lines)
        model = {"id": HOSTILE, "root": HOSTILE, "parent": None}
        fields = {"version": HOSTILE, "data": [model], "tokens": [1, 2, 3], "prompt": HOSTILE, "detail": HOSTILE}
        return self.status, {**fields, "error": {"message": HOSTILE}} if self.status >= 400 else fields


def recipe(text: str) -> str:
    """Return a recipe as a pin of another client may carry it."""
    tools = [{text: text}]
    return json.dumps({"version": 2, "kind": text, "content": text, "tools": tools, "chat_template_kwargs": {text: 1}})
