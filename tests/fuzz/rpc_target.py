"""Every RPC of a real daemon in a process of its own: messages made from the descriptors, changed ones, and any bytes.

An input names a method and holds the messages of its request stream, serialized. The daemon has a bystander: an engine
of another namespace, with a pinned prompt. At the end its bytes are read back, and no answer may have shown them.
"""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import DecodeError

from kvtier._pb import cache_pb2, engine_pb2
from tests.fakes.scripted_engine import chunk_key, hello_message
from tests.fuzz.attacked_daemon import CALL_S, SECRET_KEYS, SECRET_NAME, AttackedDaemon
from tests.fuzz.base import ACCEPTED, DaemonError, reason
from tests.fuzz.mutation import Choices

METHODS: dict[str, MethodDescriptor] = {
    method.name: method
    for file, service in ((cache_pb2, "CacheService"), (engine_pb2, "EngineService"))
    for method in file.DESCRIPTOR.services_by_name[service].methods
}
_STREAM_S = 0.3
"""What a stream without end is read for."""
_MAX_ANSWERS = 50
_REFUSALS = {
    *(grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.ALREADY_EXISTS),
    *(grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ABORTED),
    *(grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.UNAVAILABLE),
}
_UNDECODABLE = "Exception deserializing request!"
"""gRPC's own answer to bytes that are no message, with status INTERNAL; no code of ours has run."""
_OWN_CLIENT = "Internal error from Core"
"""What this client makes of a stream that ends while it writes, whatever status the daemon sent."""
MESSAGE_MARK = b"\0--next--\0"


def packed(method: str, messages: Sequence[bytes]) -> bytes:
    """Return an input: the method's name, and the messages that are sent."""
    return method.encode() + MESSAGE_MARK + MESSAGE_MARK.join(messages)


class RpcTarget:
    """Implements `Target`; a daemon of its own from the start to `close`."""

    name = "rpc"
    words: Sequence[bytes] = (
        SECRET_NAME.encode(),
        b"p@1",
        b"\x08\xff\xff\xff\xff\x0f",
        b"\x1a\x80\x80\x04",
        b"\xff" * 9,
    )

    def __init__(self) -> None:
        self._daemon = AttackedDaemon("--http-listen=off")

    @property
    def peak_rss_mib(self) -> float:
        """Of the daemon."""
        return self._daemon.peak_rss_mib

    def seeds(self) -> Sequence[bytes]:
        """See `Target`: each method without and with fields, and a session that stores and loads."""
        pin = cache_pb2.PinRequest(name="p", tokens=range(80), model="model", ttl_s=60)
        found = [packed(name, [b""]) for name in METHODS]
        found += [
            packed("Pin", [pin.SerializeToString()]),
            packed("GetPrompt", [cache_pb2.GetPromptRequest(name="p").SerializeToString()]),
            packed("ListPrompts", [cache_pb2.ListPromptsRequest(page_size=1, page_token="p").SerializeToString()]),
            packed("ListNamespaces", [cache_pb2.ListNamespacesRequest(page_token="0" * 32).SerializeToString()]),
            packed("Explain", [cache_pb2.ExplainRequest(tokens=range(80), model="model").SerializeToString()]),
            packed("UpdatePrompt", [cache_pb2.UpdatePromptRequest(name="p").SerializeToString()]),
            packed("Export", [cache_pb2.ExportRequest(name="p").SerializeToString()]),
            packed("Attach", self._session()),
        ]
        return found

    def _session(self) -> list[bytes]:
        kinds: list[dict[str, Any]] = [
            {"hello": hello_message()},
            {"ping": engine_pb2.Ping(id=7)},
            {"acquire": engine_pb2.Acquire(acquire_id=1, keys=[*SECRET_KEYS, chunk_key(1)])},
            {"release": engine_pb2.Release(acquire_id=1, all=True)},
            {"touch": engine_pb2.Touch()},
        ]
        return [
            engine_pb2.EngineMessages(messages=[engine_pb2.EngineMessage(**kind)]).SerializeToString() for kind in kinds
        ]

    def mend(self, data: bytes) -> bytes:
        """Make messages from the descriptor of the method, by what the changed bytes choose."""
        name, *messages = data.split(MESSAGE_MARK)
        names = list(METHODS)
        method = METHODS.get(name.decode("latin-1")) or METHODS[names[sum(name) % len(names)]]
        made = [self._made(method.input_type, Choices(message or b"\1")) for message in messages[:20]]
        if method.name == "Attach":
            hello = engine_pb2.EngineMessages(messages=[engine_pb2.EngineMessage(hello=hello_message())])
            made = [hello.SerializeToString(), *made]
        return packed(method.name, made)

    def _made(self, kind: Any, choices: Choices) -> bytes:
        message = _MESSAGES[kind.full_name]()
        _fill(message, choices, depth=0)
        try:
            return bytes(message.SerializePartialToString())
        except ValueError:
            return b""

    def read(self, data: bytes) -> str:
        """See `Target`."""
        name, *messages = data.split(MESSAGE_MARK)
        method = METHODS.get(name.decode("latin-1"))
        if method is None:
            return "no such method"
        return self._daemon.run(self._call(method, messages[:50]))

    async def _call(self, method: MethodDescriptor, messages: Sequence[bytes]) -> str:
        path = f"/{method.containing_service.full_name}/{method.name}"
        many_in, many_out = method.client_streaming, method.server_streaming
        kind = f"{'stream' if many_in else 'unary'}_{'stream' if many_out else 'unary'}"
        request: Any = _sent(messages, many_out) if many_in else b"".join(messages)
        call = getattr(self._daemon.channel, kind)(path)(request, timeout=CALL_S)
        answers: list[bytes] = []
        outcome = ACCEPTED
        try:
            if many_out:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_STREAM_S):
                        async for answer in call:
                            answers.append(answer)
                            if len(answers) >= _MAX_ANSWERS:
                                break
                call.cancel()
            else:
                answers.append(await call)
        except grpc.aio.AioRpcError as exc:
            outcome = self._refusal(method, exc, messages)
        except asyncio.CancelledError:
            pass
        self._check_answers(method, answers)
        return f"{method.name} {outcome}" if outcome != ACCEPTED else ACCEPTED

    def _refusal(self, method: MethodDescriptor, exc: grpc.aio.AioRpcError, messages: Sequence[bytes]) -> str:
        details = exc.details() or ""
        if exc.code() is grpc.StatusCode.INTERNAL and details == _UNDECODABLE and not _decodes(method, messages):
            return "undecodable"
        if exc.code() is grpc.StatusCode.INTERNAL and details == _OWN_CLIENT:
            return "ended while more was sent"
        if exc.code() not in _REFUSALS:
            raise DaemonError(f"{method.name}: {exc.code()}: {details[:300]}") from exc
        if not 0 < len(details) <= 2100:
            raise DaemonError(f"{method.name}: {exc.code()} with {len(details)} characters of details")
        return reason(DaemonError(f"{exc.code().name} {details}"))

    def _check_answers(self, method: MethodDescriptor, answers: Sequence[bytes]) -> None:
        """An engine of another namespace is shown neither the salt nor the bytes of the bystander."""
        if method.name != "Attach":
            return
        payloads = [self._daemon.bystander.engine.payload(key)[:64] for key in SECRET_KEYS]
        for answer in answers:
            if any(payload in answer for payload in payloads):
                raise DaemonError("an engine of another namespace got the bystander's bytes")
            for message in engine_pb2.DaemonMessages.FromString(answer).messages:
                update = message.acquire_update
                states = [chunk.state for chunk in update.chunks]
                if update.resident.indexes or engine_pb2.ChunkResidency.HOST in states:
                    raise DaemonError("an engine of another namespace got a lease on what it never stored")

    def close(self) -> None:
        """See `Target`. An input may have evicted what the bystander stored: operators over the socket may."""
        self._daemon.close(is_whole=False)


_TEXTS = [
    "",
    "p",
    "q",
    "a/b",
    SECRET_NAME,
    "p@1",
    "auto-1",
    "x" * 5000,
    "\0",
    "\x1b[2J",
    "{}",
    "[" * 3000,
    "model",
    "ö" * 200,
]
_BYTES = [b"", b"\0" * 16, *SECRET_KEYS, chunk_key(1), chunk_key(2), b"x" * 36, b"x" * 5000, SECRET_KEYS[0][:16]]
_INTS = [0, 1, 2, 3, 7, 16, 80, 255, 1000, 2**16, 2**20, 2**31 - 1]
_WIDE = [2**32 - 1, 2**32, 2**48, 2**63 - 1]


def _fill(message: Any, choices: Choices, depth: int) -> None:
    """Set about half of the fields of a message."""
    for descriptor in message.DESCRIPTOR.fields:
        if choices.next(2) or depth > 4:
            continue
        if descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry:
            for _ in range(choices.next(3)):
                with contextlib.suppress(ValueError, TypeError, AttributeError):
                    getattr(message, descriptor.name)[_scalar(descriptor.message_type.fields[0], choices)] = _scalar(
                        descriptor.message_type.fields[1], choices
                    )
        elif descriptor.is_repeated:
            many = 5000 if choices.next(30) == 0 and descriptor.message_type is None else choices.next(4)
            target = getattr(message, descriptor.name)
            for _ in range(many):
                if descriptor.message_type is not None:
                    _fill(target.add(), choices, depth + 1)
                else:
                    with contextlib.suppress(ValueError):
                        target.append(_scalar(descriptor, choices))
        elif descriptor.message_type is not None:
            child = getattr(message, descriptor.name)
            child.SetInParent()
            _fill(child, choices, depth + 1)
        else:
            with contextlib.suppress(ValueError):
                setattr(message, descriptor.name, _scalar(descriptor, choices))


def _scalar(descriptor: FieldDescriptor, choices: Choices) -> Any:
    """Return a value of a field's type."""
    match descriptor.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING if descriptor.type == FieldDescriptor.TYPE_BYTES:
            return _BYTES[choices.next(len(_BYTES))]
        case FieldDescriptor.CPPTYPE_STRING:
            return _TEXTS[choices.next(len(_TEXTS))]
        case FieldDescriptor.CPPTYPE_BOOL:
            return bool(choices.next(2))
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return [0.0, -1.0, 1e30, float("inf"), float("nan"), 0.5][choices.next(6)]
        case FieldDescriptor.CPPTYPE_ENUM:
            return choices.next(8)
        case FieldDescriptor.CPPTYPE_INT32 | FieldDescriptor.CPPTYPE_INT64:
            return (_INTS[choices.next(len(_INTS))]) * (-1 if choices.next(4) == 0 else 1)
        case _:
            pool = [*_INTS, *_WIDE] if choices.next(3) == 0 else _INTS
            return pool[choices.next(len(pool))]


def _messages(file: Any) -> Iterator[tuple[str, Any]]:
    for name, descriptor in file.DESCRIPTOR.message_types_by_name.items():
        yield descriptor.full_name, getattr(file, name)


_MESSAGES = dict([*_messages(cache_pb2), *_messages(engine_pb2)])


def _decodes(method: MethodDescriptor, messages: Sequence[bytes]) -> bool:
    kind = _MESSAGES[method.input_type.full_name]
    try:
        for message in messages if method.client_streaming else [b"".join(messages)]:
            kind.FromString(message)
    except DecodeError:
        return False
    return True


async def _sent(messages: Sequence[bytes], stays: bool) -> Any:
    for message in messages:
        yield message
    if stays:  # a session ends when its engine's side does
        await asyncio.sleep(_STREAM_S)
