"""A fake daemon for tests of the engine's side: a `DaemonModel` behind real gRPC on a unix socket, with an arena file.

It answers at once, records what engines say, and can be made to refuse, to send anything, or to die.
"""

import itertools
import queue
import threading
from collections.abc import Iterable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from kvtier._pb import engine_pb2 as pb
from kvtier._pb import engine_pb2_grpc
from kvtier.client.address import channel_target
from kvtier.client.arena_map import ArenaMap
from kvtier.core.arena_format import ArenaGeometry
from tests.fakes.arena_file import set_generation, write_arena
from tests.fakes.daemon_model import DaemonModel
from tests.fakes.waiting import wait_for


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
        """See `EngineLink`."""
        self.outbox.put(message)

    def lost(self) -> None:
        """See `EngineLink`."""
        self.outbox.put(None)


class FakeDaemon(DaemonModel, engine_pb2_grpc.EngineServiceServicer):
    """Serves EngineService on `folder`/d.sock between `start` and `stop`, to the engine that attached last.

    Attributes:
        sessions: Every session so far.
        refusal: Status with which Attach fails, if any.
    """

    def __init__(self, folder: Path, geometry: ArenaGeometry, **options: Any) -> None:
        super().__init__(geometry.num_slots, **options)
        self.folder, self.geometry = folder, geometry
        self.socket, self.arena_path = folder / "d.sock", folder / "rows.arena"
        write_arena(self.arena_path, geometry)
        self.sessions: list[FakeSession] = []
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self._lock = threading.Lock()
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
                session.lost()
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
        self, request_iterator: Iterator[pb.EngineMessages], context: grpc.ServicerContext
    ) -> Iterable[pb.DaemonMessages]:
        """The one RPC."""
        (first,) = next(request_iterator).messages
        hello = first.hello
        if self.refusal is not None:
            context.abort(*self.refusal)
        session = FakeSession(hello)
        with self._lock:
            self.lose_session()
            self.sweep()
            self.attach(session, hello.store_credits)
            self.sessions.append(session)
        threading.Thread(target=self._read, args=(session, request_iterator), daemon=True).start()
        while (message := session.outbox.get()) is not None:
            yield pb.DaemonMessages(messages=[message])

    def _read(self, session: FakeSession, received: Iterator[pb.EngineMessages]) -> None:
        try:
            for message in itertools.chain.from_iterable(together.messages for together in received):
                session.received.append(message)
                with self._lock:
                    if self.link is session:
                        self.receive(message)
                        self._act()
        except grpc.RpcError:
            pass
        session.lost()

    def _act(self) -> None:
        for acquire_id, acquire in list(self.acquires.items()):
            if not acquire.is_answered:
                self.answer(acquire_id)
        for number in self.promotions:
            self.promote(number, well=True)

    def _welcome(self, session: str) -> pb.Welcome:
        welcome = super()._welcome(session)
        lock_path = self.folder / f"session-{session}.lock"
        lock_path.touch()
        welcome.namespace_id, welcome.lock_path = "n", str(lock_path)
        welcome.arena.CopyFrom(
            pb.ArenaInfo(
                arena_id=self.geometry.arena_id,
                path=str(self.arena_path),
                num_slots=self.geometry.num_slots,
                row_bytes=self.geometry.row_bytes,
            )
        )
        return welcome

    def _receive_ping(self, ping: pb.Ping) -> None:
        self.pong(ping.id)

    def _give_out(self, number: int) -> None:
        super()._give_out(number)
        set_generation(self.arena_path, self.geometry, number, self.slots[number].generation)

    def _read_row(self, number: int) -> None:
        slot = self.slots[number]
        with ArenaMap(self.arena_path, self.geometry.arena_id) as arena:
            stamps = {arena.stamp_of(number, rank)[:2] for rank in range(self.geometry.num_ranks)}
        slot.stamp = stamps.pop() if len(stamps) == 1 else None
        with self.arena_path.open("rb") as file:
            file.seek(self.geometry.row_offset(number))
            slot.row = file.read(self.geometry.row_bytes)

    def _put_row(self, number: int, row: Any) -> None:
        if row is not None:
            super()._put_row(number, row)
            with self.arena_path.open("r+b") as file:
                file.seek(self.geometry.row_offset(number))
                file.write(row)
