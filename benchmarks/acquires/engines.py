"""An engine that acquires and releases as fast as it is answered: with the connector's client, or with ready bytes."""

import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc

from benchmarks.measuring.daemon_fixtures import FINGERPRINT, LAYOUT
from kvtier._pb import engine_pb2 as pb
from kvtier.client.address import channel_target
from kvtier.client.engine_session import Attachment, EngineSession
from kvtier.core.layout import ChunkKey
from tests.fakes.scripted_engine import hello_message

TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one engine does: `session` or `raw`, so many acquires under way, for so long.

    Attributes:
        fingerprint: Of the model that it runs.
        prompts: Keys of each prompt that it asks for, in turn; of one length.
    """

    kind: str
    socket: Path
    prompts: Sequence[Sequence[ChunkKey]]
    num_open: int
    seconds: float
    fingerprint: Mapping[str, str] = field(default_factory=lambda: FINGERPRINT)


class SessionEngine:
    """An engine with the connector's client; listens to its session."""

    def __init__(self, load: Load, engine_id: str) -> None:
        self._load = load
        self._events: queue.SimpleQueue[Attachment | pb.AcquireUpdate] = queue.SimpleQueue()
        hello = hello_message(LAYOUT, fingerprint=dict(load.fingerprint), engine_id=engine_id)
        self._session = EngineSession(load.socket, lambda turn: hello, self)
        self._session.start()
        attached = self._events.get(timeout=TIMEOUT_S)
        assert isinstance(attached, Attachment)
        self._attachment = attached
        self._asked_s: dict[int, float] = {}

    def on_attached(self, attachment: Attachment) -> None:
        """See SessionListener."""
        self._events.put(attachment)

    def on_message(self, attachment: Attachment, message: pb.DaemonMessage) -> None:
        """See SessionListener."""
        if message.WhichOneof("kind") == "acquire_update":
            self._events.put(message.acquire_update)

    def on_detached(self, attachment: Attachment) -> None:
        """See SessionListener."""

    def run(self) -> list[float]:
        """Acquire and release; return seconds from each acquire to its answer."""
        latency_s, number, stop_s = list[float](), self._load.num_open, time.perf_counter() + self._load.seconds
        for acquire_id in range(1, number + 1):
            self._ask(acquire_id)
        while time.perf_counter() < stop_s:
            update = self._events.get(timeout=TIMEOUT_S)
            assert isinstance(update, pb.AcquireUpdate)
            assert len(update.resident.indexes) == len(self._load.prompts[0])
            latency_s.append(time.perf_counter() - self._asked_s.pop(update.acquire_id))
            self._attachment.send(pb.EngineMessage(release=pb.Release(acquire_id=update.acquire_id, all=True)))
            number += 1
            self._ask(number)
        return latency_s

    def _ask(self, acquire_id: int) -> None:
        self._asked_s[acquire_id] = time.perf_counter()
        keys = self._load.prompts[acquire_id % len(self._load.prompts)]
        acquire = pb.Acquire(acquire_id=acquire_id, keys=keys)
        self._attachment.send(pb.EngineMessage(acquire=acquire))

    def close(self) -> None:
        """End the session."""
        self._session.close()


class RawEngine:
    """An engine that sends ready bytes on a stream of its own."""

    def __init__(self, load: Load, engine_id: str) -> None:
        self._load, self._asked_s = load, dict[int, float]()
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        hello = hello_message(LAYOUT, fingerprint=dict(load.fingerprint), engine_id=engine_id)
        self._outgoing.put(_bytes_of(hello=hello))
        self._channel = grpc.insecure_channel(channel_target(load.socket))
        attach = self._channel.stream_stream("/kvtier.v1.EngineService/Attach", None, pb.DaemonMessages.FromString)
        self._call = attach(self._sent())
        self._answers = (message for together in self._call for message in together.messages)
        assert next(self._answers).WhichOneof("kind") == "welcome"
        self._messages = [
            _bytes_of(release=pb.Release(acquire_id=number, all=True))
            + _bytes_of(acquire=pb.Acquire(acquire_id=number, keys=load.prompts[number % len(load.prompts)]))
            for number in range(1, load.num_open + 1)
        ]

    def _sent(self) -> Iterator[bytes]:
        """Yield what is ready together, as the client does: bytes of EngineMessages may be appended to each other."""
        while (first := self._outgoing.get()) is not None:
            ready = [first]
            while not self._outgoing.empty() and (more := self._outgoing.get()) is not None:
                ready.append(more)
            yield b"".join(ready)

    def run(self) -> list[float]:
        """Release and acquire, with ids that come again; return seconds from each acquire to its answer."""
        latency_s, stop_s = list[float](), time.perf_counter() + self._load.seconds
        for acquire_id in range(1, self._load.num_open + 1):
            self._ask(acquire_id)
        for answer in self._answers:
            if answer.WhichOneof("kind") != "acquire_update":
                continue
            update = answer.acquire_update
            assert len(update.resident.indexes) == len(self._load.prompts[0])
            latency_s.append(time.perf_counter() - self._asked_s[update.acquire_id])
            if time.perf_counter() > stop_s:
                break
            self._ask(update.acquire_id)
        return latency_s

    def _ask(self, acquire_id: int) -> None:
        self._asked_s[acquire_id] = time.perf_counter()
        self._outgoing.put(self._messages[acquire_id - 1])

    def close(self) -> None:
        """End the session."""
        self._outgoing.put(None)
        self._call.cancel()
        self._channel.close()


def _bytes_of(**kind: Any) -> bytes:
    return pb.EngineMessages(messages=[pb.EngineMessage(**kind)]).SerializeToString()


def be_engine(load: Load, number: int, pipe: Connection) -> None:
    """The process of an engine: say when it is attached, run when told, send latencies and CPU seconds."""
    engine = (SessionEngine if load.kind == "session" else RawEngine)(load, f"engine-{number}")
    pipe.send(None)
    pipe.recv()
    used_s = time.process_time()
    latency_s = engine.run()
    pipe.send((latency_s, time.process_time() - used_s))
    pipe.recv()
    engine.close()
