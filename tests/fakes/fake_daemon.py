"""A daemon in a few lines for tests of the engine's side: real gRPC on a unix socket, a real arena file, no tiers.

It records what the engine says, answers Acquire from `held`, believes stamps like the daemon does, and can be told to
be silent, to refuse, or to die.
"""

import fcntl
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from pathlib import Path

import grpc

from kvtier._pb import engine_pb2 as pb
from kvtier._pb import engine_pb2_grpc
from kvtier.client.address import channel_target
from kvtier.client.arena_map import ArenaMap
from kvtier.core.arena_format import HEADER_BYTES, WORD_BYTES, ArenaGeometry, key_tag_of, pack_header
from tests.fakes.waiting import wait_for


def write_arena(path: Path, geometry: ArenaGeometry) -> None:
    """Create an empty arena file."""
    with path.open("wb") as file:
        file.write(pack_header(geometry))
        file.truncate(geometry.file_bytes)


def set_generation(path: Path, geometry: ArenaGeometry, slot: int, generation: int) -> None:
    """Give a slot out again, as the daemon would."""
    _set_word(path, geometry.generation_word(slot), generation)


def set_backing(path: Path, geometry: ArenaGeometry, slot: int, number: int) -> None:
    """Say that a row has got pages (odd), or lost them, as the daemon would."""
    _set_word(path, geometry.backed_word(slot), number)


def _set_word(path: Path, word: int, value: int) -> None:
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + word * WORD_BYTES)
        file.write(value.to_bytes(8, "little"))


class FakeSession:
    """One attached engine, as the daemon sees it."""

    def __init__(self, hello: pb.Hello) -> None:
        self.hello = hello
        self.received: list[pb.EngineMessage] = []
        self.outbox: queue.SimpleQueue[pb.DaemonMessage | None] = queue.SimpleQueue()

    def kinds(self) -> list[str | None]:
        """Return the kinds of what was received, in order."""
        return [message.WhichOneof("kind") for message in self.received]

    def send(self, message: pb.DaemonMessage) -> None:
        """Say something to the engine."""
        self.outbox.put(message)


class FakeDaemon(engine_pb2_grpc.EngineServiceServicer):
    """Serves EngineService on `folder`/d.sock between `start` and `stop`.

    Attributes:
        sessions: Every session so far.
        pins: Sent with Welcome.
        held: Chunks it holds, by key: slot and generation.
        silent: Answers neither Acquire nor Ping while set.
        refusal: Status with which Attach fails, if any.
    """

    def __init__(self, folder: Path, geometry: ArenaGeometry) -> None:
        self.folder, self.geometry = folder, geometry
        self.socket = folder / "d.sock"
        self.arena_path = folder / "arena"
        write_arena(self.arena_path, geometry)
        self.sessions: list[FakeSession] = []
        self.pins: list[pb.Pin] = []
        self.later_pin_ids: list[str] = []
        self.held: dict[bytes, pb.SlotRef] = {}
        self.silent = False
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self._free = list(range(geometry.num_slots))
        self._server: grpc.Server | None = None

    def start(self) -> None:
        """Listen."""
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        engine_pb2_grpc.add_EngineServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(channel_target(self.socket))
        self._server.start()

    def stop(self) -> None:
        """Die: every stream breaks, the socket is gone."""
        if self._server is not None:
            for session in self.sessions:
                session.outbox.put(None)
            self._server.stop(None).wait(5)
            self._server = None

    def session(self, number: int = -1) -> FakeSession:
        """Return a session, waiting for the first one."""
        wait_for(lambda: bool(self.sessions))
        return self.sessions[number]

    def wait_sessions(self, count: int) -> FakeSession:
        """Wait until this many sessions have attached; return the last."""
        wait_for(lambda: len(self.sessions) >= count)
        return self.sessions[-1]

    def Attach(
        self, request_iterator: Iterator[pb.EngineMessage], context: grpc.ServicerContext
    ) -> Iterable[pb.DaemonMessage]:
        """The one RPC."""
        hello = next(request_iterator).hello
        if self.refusal is not None:
            context.abort(*self.refusal)
        session = FakeSession(hello)
        session.send(pb.DaemonMessage(welcome=self._welcome(hello)))
        session.send(pb.DaemonMessage(store_credits=pb.StoreCredits(slots=self._grant(hello.store_credits))))
        threading.Thread(target=self._read, args=(session, request_iterator), daemon=True).start()
        self.sessions.append(session)
        while (message := session.outbox.get()) is not None:
            yield message

    def _welcome(self, hello: pb.Hello) -> pb.Welcome:
        number = len(self.sessions)
        lock_path = self.folder / f"session-{number}.lock"
        lock_path.touch()
        return pb.Welcome(
            session_id=f"s{number}",
            namespace_id="n" + hello.fingerprint.get("epoch", ""),
            arena=pb.ArenaInfo(
                arena_id=self.geometry.arena_id,
                path=str(self.arena_path),
                num_slots=self.geometry.num_slots,
                row_bytes=self.geometry.row_bytes,
            ),
            lock_path=str(lock_path),
            pins=self.pins,
            pin_ids=[*(pin.pin_id for pin in self.pins), *self.later_pin_ids],
        )

    def _grant(self, count: int) -> list[pb.SlotRef]:
        granted, self._free = self._free[:count], self._free[count:]
        for slot in granted:
            set_generation(self.arena_path, self.geometry, slot, 1)
        return [pb.SlotRef(slot=slot, generation=1) for slot in granted]

    def _read(self, session: FakeSession, messages: Iterator[pb.EngineMessage]) -> None:
        try:
            for message in messages:
                session.received.append(message)
                self._answer(session, message)
        except grpc.RpcError:
            pass
        session.outbox.put(None)

    def _answer(self, session: FakeSession, message: pb.EngineMessage) -> None:
        answers: dict[str, Callable[[], pb.DaemonMessage]] = {
            "bind_pin": lambda: self._chunks_held(list(message.bind_pin.keys)),
            "store_done": lambda: self._commit(message.store_done),
        }
        if not self.silent:
            answers["acquire"] = lambda: self._acquire_update(message.acquire)
            answers["ping"] = lambda: pb.DaemonMessage(pong=pb.Pong(id=message.ping.id))
        answer = answers.get(message.WhichOneof("kind") or "")
        if answer is not None:
            session.send(answer())

    def _acquire_update(self, acquire: pb.Acquire) -> pb.DaemonMessage:
        chunks = [
            pb.ChunkResidency(index=index, state=pb.ChunkResidency.HOST, slot=self.held[key])
            for index, key in enumerate(acquire.keys)
            if key in self.held
        ]
        return pb.DaemonMessage(acquire_update=pb.AcquireUpdate(acquire_id=acquire.acquire_id, chunks=chunks))

    def _chunks_held(self, keys: list[bytes]) -> pb.DaemonMessage:
        held = [key for key in keys if key in self.held]
        return pb.DaemonMessage(chunks_held=pb.ChunksHeld(keys=held, held=True))

    def _commit(self, done: pb.StoreDone) -> pb.DaemonMessage:
        with ArenaMap(self.arena_path, self.geometry.arena_id) as arena:
            stamped = [store for store in done.stores if self._is_stamped(arena, store)]
        self.held.update((store.key, store.slot) for store in stamped)
        return pb.DaemonMessage(chunks_held=pb.ChunksHeld(keys=[store.key for store in stamped], held=True))

    def _is_stamped(self, arena: ArenaMap, store: pb.StoreSlot) -> bool:
        stamps = [arena.stamp_of(store.slot.slot, rank) for rank in range(self.geometry.num_ranks)]
        expected = (key_tag_of(store.key), store.slot.generation)
        return all((stamp.key_tag, stamp.generation) == expected for stamp in stamps)


def is_locked(path: Path) -> bool:
    """Return whether somebody holds a session's lock."""
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
