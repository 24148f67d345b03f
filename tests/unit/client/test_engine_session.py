import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvtier._pb import engine_pb2 as pb
from kvtier.client import engine_session
from kvtier.client.engine_session import Attachment, EngineSession, NotReadyError
from kvtier.client.trusted_socket import TrustedSocket, open_trusted
from kvtier.errors import UntrustedSocketError
from tests.fakes.fake_daemon import FakeDaemon
from tests.fakes.waiting import wait_for


class Recorder:
    """A listener that keeps what it receives."""

    def __init__(self) -> None:
        self.attached: list[Attachment] = []
        self.detached: list[Attachment] = []
        self.messages: queue.SimpleQueue[pb.DaemonMessage] = queue.SimpleQueue()

    def on_attached(self, attachment: Attachment) -> None:
        self.attached.append(attachment)

    def on_message(self, attachment: Attachment, message: pb.DaemonMessage) -> None:
        self.messages.put(message)

    def on_detached(self, attachment: Attachment) -> None:
        self.detached.append(attachment)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def session(daemon: FakeDaemon, recorder: Recorder) -> Iterator[EngineSession]:
    made = EngineSession(
        daemon.socket, lambda turn: pb.Hello(engine_id=f"e{turn}", store_credits=2, ephemeral=turn > 0), recorder
    )
    yield made
    made.close()


def acquire(acquire_id: int) -> pb.EngineMessage:
    return pb.EngineMessage(acquire=pb.Acquire(acquire_id=acquire_id, keys=[b"k"]))


def test_says_hello_first_and_answers_come_back(daemon: FakeDaemon, session: EngineSession, recorder: Recorder) -> None:
    slot = daemon.hold(b"k")
    daemon.start()
    session.start()
    wait_for(lambda: bool(recorder.attached))
    recorder.attached[0].send(acquire(1))
    assert daemon.session().hello.engine_id == "e0"
    assert recorder.messages.get(timeout=5).store_credits.slots
    update = recorder.messages.get(timeout=5).acquire_update
    resident = update.resident
    assert (update.acquire_id, [*resident.slots], [*resident.generations]) == (1, [slot.slot], [slot.generation])


def test_waits_for_a_daemon_that_is_not_there_yet(
    daemon: FakeDaemon, session: EngineSession, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    assert not session.is_failing
    session.start()
    wait_for(lambda: "there is no such socket" in caplog.text)
    wait_for(lambda: session.is_failing)
    daemon.start()
    wait_for(lambda: bool(recorder.attached))
    assert not session.is_failing
    assert caplog.text.count("no kvtier-daemon answers") == 1, "one warning, not one per attempt"


def test_a_killed_and_restarted_daemon_is_used_again(
    daemon: FakeDaemon, session: EngineSession, recorder: Recorder
) -> None:
    daemon.start()
    session.start()
    wait_for(lambda: bool(recorder.attached))
    daemon.stop()
    wait_for(lambda: len(recorder.detached) == 1)
    daemon.start()
    wait_for(lambda: len(recorder.attached) == 2)


def test_it_tries_again_at_once_and_then_every_half_second(session: EngineSession) -> None:
    """However long the daemon is away."""
    pauses: list[float | None] = []

    class Passing(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout)
            if len(pauses) == 9:
                self.set()
            return self.is_set()

    session._stop = Passing()
    session._run()
    assert pauses == [0.05, 0.1, 0.2, 0.4] + [0.5] * 5


def test_messages_for_an_old_session_never_reach_a_new_one(
    daemon: FakeDaemon, session: EngineSession, recorder: Recorder
) -> None:
    daemon.start()
    session.start()
    wait_for(lambda: bool(recorder.attached))
    daemon.stop()
    wait_for(lambda: len(recorder.detached) == 1)
    daemon.start()
    wait_for(lambda: len(recorder.attached) == 2)
    recorder.attached[0].send(acquire(1))
    recorder.attached[1].send(acquire(2))
    wait_for(lambda: bool(daemon.sessions[1].received))
    assert [message.acquire.acquire_id for message in daemon.sessions[1].received] == [2]


def test_reopen_makes_a_new_hello(daemon: FakeDaemon, session: EngineSession, recorder: Recorder) -> None:
    daemon.start()
    session.start()
    wait_for(lambda: bool(recorder.attached))
    session.reopen()
    assert recorder.attached[0].turn != session.turn
    assert daemon.wait_sessions(2).hello.ephemeral
    wait_for(lambda: len(recorder.attached) == 2)
    assert recorder.attached[1].turn == session.turn == 1


def start_and_try_thrice(session: EngineSession) -> None:
    """Start a session whose daemon refuses it, and wait for the third attempt."""
    attempts = threading.Semaphore(0)

    def make_hello(turn: int) -> pb.Hello:
        attempts.release()
        return pb.Hello()

    session._make_hello = make_hello
    session.start()
    for _ in range(3):
        assert attempts.acquire(timeout=5)


def test_a_refusal_is_logged_once_and_loudly(
    daemon: FakeDaemon, session: EngineSession, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_session, "RETRY_S", 0.01)
    daemon.refusal = (grpc.StatusCode.INVALID_ARGUMENT, "layout.rank_bytes = 0: must be positive")
    daemon.start()
    start_and_try_thrice(session)
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert "layout.rank_bytes = 0" in errors[0].getMessage()


def test_a_daemon_whose_ledger_refuses_is_named_once_and_asked_again(
    daemon: FakeDaemon,
    session: EngineSession,
    recorder: Recorder,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was a lost session, at INFO, twice a second and for ever: vLLM served without kvtier, and no one knew why."""
    monkeypatch.setattr(engine_session, "RETRY_S", 0.01)
    daemon.refusal = (grpc.StatusCode.INTERNAL, "ledger.sqlite: database or disk is full; nothing was changed")
    daemon.start()
    start_and_try_thrice(session)
    assert session.is_failing
    (error,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "database or disk is full" in error.getMessage()
    daemon.refusal = None
    wait_for(lambda: bool(recorder.attached))


def test_an_untrusted_socket_is_an_error_once_also_when_there_was_none_before(
    daemon: FakeDaemon,
    session: EngineSession,
    recorder: Recorder,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other user's process may come and go: that must not fill vLLM's log."""
    socket = daemon.socket
    untrusted = UntrustedSocketError(socket, "uid 4711 listens there", 4711, {0}, "look into it")
    outcomes = iter([FileNotFoundError(2, "none"), untrusted, FileNotFoundError(2, "none"), untrusted])

    def opening(path: Path, daemon_uid: int | None) -> TrustedSocket:
        if (error := next(outcomes, None)) is not None:
            raise error
        return open_trusted(path, daemon_uid)

    monkeypatch.setattr(engine_session, "open_trusted", opening)
    daemon.start()
    session.start()
    wait_for(lambda: bool(recorder.attached))
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert errors == [f"kvtier: {untrusted}; vLLM serves without kvtier until then"]


def test_asks_for_the_hello_again_until_it_is_ready(daemon: FakeDaemon, recorder: Recorder) -> None:
    daemon.start()
    calls = iter([NotReadyError("starting"), NotReadyError("starting"), None])

    def make_hello(turn: int) -> pb.Hello:
        if (error := next(calls)) is not None:
            raise error
        return pb.Hello(engine_id="e")

    session = EngineSession(daemon.socket, make_hello, recorder)
    session.start()
    wait_for(lambda: bool(recorder.attached))
    session.close()


def test_probes_only_while_asked_to(daemon: FakeDaemon, session: EngineSession, recorder: Recorder) -> None:
    daemon.start()
    session.start()
    wait_for(lambda: bool(recorder.attached))
    assert "ping" not in daemon.session().kinds()
    session.probe(True)
    wait_for(lambda: "ping" in daemon.session().kinds())
    recorder.messages.get(timeout=5)
    assert recorder.messages.get(timeout=5).WhichOneof("kind") == "pong"


def test_close_lets_what_is_enqueued_go_out(daemon: FakeDaemon, session: EngineSession, recorder: Recorder) -> None:
    daemon.start()
    session.start()
    wait_for(lambda: bool(recorder.attached))
    recorder.attached[0].send(acquire(9))
    session.close()
    assert daemon.session().kinds() == ["acquire", "goodbye"], "or an engine that ends in order looks like one killed"
    assert recorder.detached == recorder.attached


def test_close_before_start_returns(daemon: FakeDaemon, recorder: Recorder) -> None:
    EngineSession(daemon.socket, lambda turn: pb.Hello(), recorder).close()


def test_a_stream_that_ends_in_the_moment_of_a_reopen_or_close_does_no_harm(
    recorder: Recorder, daemon: FakeDaemon
) -> None:
    """Both run in vLLM's scheduler thread, the session's thread forgets the stream meanwhile."""

    class Stream:
        def cancel(self) -> None:
            pass

    class Vanishing(EngineSession):
        num_reads = 0

        @property
        def _call(self) -> Any:
            self.num_reads += 1
            return Stream() if self.num_reads % 2 else None

        @_call.setter
        def _call(self, call: Any) -> None:
            pass

    session = Vanishing(daemon.socket, lambda turn: pb.Hello(), recorder)
    session.reopen()
    assert session.turn == 1
