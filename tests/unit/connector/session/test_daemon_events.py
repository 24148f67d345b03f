"""The whole engine side against a fake daemon over real gRPC: pins are bound in order."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

import kvtier_connector.session.daemon_events
from kvtier._pb import engine_pb2 as pb
from kvtier.core.arena_format import ArenaGeometry
from kvtier_connector.engine.chunk_keys import GroupShape
from kvtier_connector.engine.lora.adapter_digests import AdapterDigests
from kvtier_connector.session.daemon_events import (
    Attached,
    BackgroundThread,
    DaemonEvents,
    Detached,
    Event,
    PinBound,
    PinGone,
    Received,
)
from kvtier_connector.session.device_blocks import DeviceBlocks
from kvtier_connector.session.pin_binder import BoundPin, PinBinder
from tests.fakes.fake_daemon import FakeDaemon, FakeSession
from tests.fakes.waiting import wait_for
from tests.unit.connector.session.test_pin_binder import FULL


def events_of(
    daemon: FakeDaemon,
    binder: PinBinder,
    background: BackgroundThread,
    on_bound: Callable[[object], None] = lambda attachment: None,
    **options: Any,
) -> DaemonEvents:
    def hello(turn: int) -> pb.Hello:
        return pb.Hello(store_credits=2)

    return DaemonEvents(daemon.socket, hello, binder, background, DeviceBlocks(None), on_bound, **options)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    geometry = ArenaGeometry(arena_id=b"A" * 16, num_slots=16, row_bytes=4096, num_ranks=1, rank_bytes=4096)
    fake = FakeDaemon(tmp_path, geometry)
    fake.pins["p"] = pb.Pin(pin_id="p", name="sys", tokens=range(20), pinned=True)
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture
def link(daemon: FakeDaemon) -> Iterator[DaemonEvents]:
    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    background = BackgroundThread("kvtier-test")
    hasher: Any = get_request_block_hasher(4, hash_fn)
    binder = PinBinder((FULL,), lambda: hasher, AdapterDigests(background.submit), 1000)
    made = events_of(daemon, binder, background)
    made.start()
    yield made
    made.close()


def test_a_background_thread_that_is_closed_ends_after_what_it_was_given() -> None:
    background, done = BackgroundThread("kvtier-test"), list[int]()
    for number in range(3):
        background.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    background.close()
    wait_for(lambda: not background._thread.is_alive())
    assert done == [0, 1, 2]


def collect(link: DaemonEvents, kind: type, events: list[Event]) -> Event:
    """Poll until an event of this kind has come."""

    def has_come() -> bool:
        events.extend(link.poll())
        return any(isinstance(event, kind) for event in events)

    wait_for(has_come)
    return next(event for event in events if isinstance(event, kind))


def test_a_pin_is_known_before_the_daemon_speaks_of_its_chunks(daemon: FakeDaemon, link: DaemonEvents) -> None:
    events: list[Event] = []
    bound = collect(link, PinBound, events)
    assert isinstance(bound, PinBound)
    wait_for(lambda: "bind_pin" in daemon.session().kinds())
    (bind,) = [m.bind_pin for m in daemon.session().received if m.WhichOneof("kind") == "bind_pin"]
    assert tuple(bind.keys) == bound.pin.keys
    assert len(bind.keys) == 2

    def received() -> list[str | None]:
        events.extend(link.poll())
        return [e.message.WhichOneof("kind") if isinstance(e, Received) else type(e).__name__ for e in events]

    wait_for(lambda: "chunks_held" in received())
    assert received().index("PinBound") < received().index("chunks_held")


def test_the_warm_start_is_notified_when_the_pins_of_a_session_are_bound(daemon: FakeDaemon) -> None:
    background = BackgroundThread("kvtier-test")
    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    hasher: Any = get_request_block_hasher(4, hash_fn)
    binder = PinBinder((FULL,), lambda: hasher, AdapterDigests(background.submit), 1000)
    polled: list[list[type]] = []

    def on_bound(attachment: object) -> None:
        polled.append([type(event) for event in made.poll()])

    made = events_of(daemon, binder, background, on_bound)
    made.start()
    wait_for(lambda: len(polled) == 1)
    assert PinBound in polled[0]
    made.close()


def test_pins_that_come_behind_the_welcome_are_waited_for_too(daemon: FakeDaemon) -> None:
    """vLLM's cache would be warmed without those for which the first message had no space."""
    daemon.later_pin_ids = ["q", "gone"]
    background = BackgroundThread("kvtier-test")
    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    hasher: Any = get_request_block_hasher(4, hash_fn)
    binder = PinBinder((FULL,), lambda: hasher, AdapterDigests(background.submit), 1000)
    polled: list[list[str]] = []

    def on_bound(attachment: object) -> None:
        polled.append([event.pin.pin_id for event in made.poll() if isinstance(event, PinBound)])

    made = events_of(daemon, binder, background, on_bound)
    made.start()
    session = daemon.wait_sessions(1)
    later = pb.Pin(pin_id="q", name="q", tokens=range(100, 120), pinned=True)
    session.send(pb.DaemonMessage(pin_removed=pb.PinRemoved(pin_id="gone")))
    session.send(pb.DaemonMessage(pin_added=pb.PinAdded(pin=later)))
    wait_for(lambda: bool(polled))
    assert polled == [["p", "q"]]
    made.close()


def test_later_pins_and_removals_keep_their_order(daemon: FakeDaemon, link: DaemonEvents) -> None:
    events: list[Event] = []
    collect(link, PinBound, events)
    session = daemon.session()
    later = pb.Pin(pin_id="q", name="q", tokens=range(100, 120), pinned=True)
    session.send(pb.DaemonMessage(pin_added=pb.PinAdded(pin=later)))
    session.send(pb.DaemonMessage(pin_removed=pb.PinRemoved(pin_id="q")))
    collect(link, PinGone, events)
    of_q = [type(e) for e in events if getattr(getattr(e, "pin", e), "pin_id", "") == "q"]
    assert of_q == [PinBound, PinGone]


def test_a_pin_that_cannot_be_bound_any_longer_is_forgotten(daemon: FakeDaemon, link: DaemonEvents) -> None:
    events: list[Event] = []
    collect(link, PinBound, events)
    too_long = pb.Pin(pin_id="p", name="sys", tokens=range(2000), pinned=True)
    daemon.session().send(pb.DaemonMessage(pin_added=pb.PinAdded(pin=too_long)))
    collect(link, PinGone, events)
    (gone,) = [event for event in events if isinstance(event, PinGone)]
    assert gone.pin_id == "p"


def test_an_engine_that_stands_idle_is_woken_once_until_it_polls(daemon: FakeDaemon) -> None:
    background, woken = BackgroundThread("kvtier-test"), threading.Semaphore(0)
    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    hasher: Any = get_request_block_hasher(4, hash_fn)
    binder = PinBinder((FULL,), lambda: hasher, AdapterDigests(background.submit), 1000)
    link = events_of(daemon, binder, background, wake=woken.release)
    link.start()
    assert woken.acquire(timeout=30)
    events: list[Event] = []

    def is_bound() -> bool:
        events.extend(link.poll())
        kinds = [event.message.WhichOneof("kind") for event in events if isinstance(event, Received)]
        return kinds.count("chunks_held") == 2  # those that are held, and those that are not: the last words

    wait_for(is_bound)
    wait_for(lambda: not [*link.poll(), *[None] * link.wait_for_events(0.01)])
    while woken.acquire(blocking=False):
        pass
    for expected in ("q", "r"):
        for pin_id in (expected, "another"):
            daemon.session().send(pb.DaemonMessage(pin_removed=pb.PinRemoved(pin_id=pin_id)))
        wait_for(lambda: link._num_items == 2)
        assert woken.acquire(timeout=30)
        assert not woken.acquire(blocking=False), "once for both"
        assert [event.pin_id for event in link.poll() if isinstance(event, PinGone)] == [expected, "another"]
    link.close()


def test_a_session_that_attached_before_a_reset_is_never_seen(daemon: FakeDaemon, link: DaemonEvents) -> None:
    """Weights changed in place: what the old session's namespace holds must not be found or added to."""
    daemon.wait_sessions(1)
    link.reopen()
    daemon.wait_sessions(2)
    events: list[Event] = []
    attached = collect(link, Attached, events)
    assert attached.attachment.turn == 1
    assert {event.attachment.turn for event in events} == {1}


@pytest.mark.parametrize("of_what", [{"keys": [b"key"] * 100}, {"pin_ids": ["pin"] * 100}])
def test_an_engine_that_does_not_poll_begins_again(
    daemon: FakeDaemon, link: DaemonEvents, monkeypatch: pytest.MonkeyPatch, of_what: dict[str, Any]
) -> None:
    """An idle engine beside a busy one collected every word on what the daemon held, for as long as it was idle."""
    monkeypatch.setattr(kvtier_connector.session.daemon_events, "MAX_ITEMS", 1000)
    first = collect(link, Attached, []).attachment
    for _ in range(20):
        daemon.session().send(pb.DaemonMessage(chunks_held=pb.ChunksHeld(**of_what, held=True)))
    daemon.wait_sessions(2)
    events: list[Event] = []
    second = collect(link, Attached, events).attachment
    of_first = [event for event in events if event.attachment is first]
    assert [type(event) for event in of_first] == [Detached], "nothing of what was forgotten may be built upon"
    assert events.index(of_first[0]) < events.index(Attached(second))


def test_a_long_standstill_keeps_the_last_session_only(
    daemon: FakeDaemon, link: DaemonEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvtier_connector.session.daemon_events, "MAX_ITEMS", 1000)
    for number in range(1, 4):
        daemon.wait_sessions(number)
        wait_for(lambda: link._overflowed is None or link._events[-1].attachment is not link._overflowed)
        for _ in range(20):
            daemon.session().send(pb.DaemonMessage(chunks_held=pb.ChunksHeld(keys=[b"key"] * 100, held=True)))
    daemon.wait_sessions(4)
    wait_for(lambda: any(isinstance(event, Attached) for event in link._events))
    assert sum(isinstance(event, Attached) for event in link._events) == 1
    assert len(link._events) < 10


def test_pins_that_come_with_their_keys_are_confirmed_in_one_message(daemon: FakeDaemon) -> None:
    background = BackgroundThread("kvtier-test")
    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    hasher: Any = get_request_block_hasher(4, hash_fn)
    group = GroupShape(group_idx=0, chunk_tokens=4, hashes_per_chunk=1, window_chunks=0)
    binder = PinBinder((group,), lambda: hasher, AdapterDigests(background.submit), 1000)
    daemon.pins.clear()
    link = events_of(daemon, binder, background)
    link.start()
    session = daemon.wait_sessions(1)
    keys = [bytes([chunk]) * 32 + bytes(4) for chunk in range(5)]
    pins = [pb.Pin(pin_id=name, name=name, tokens=range(20), pinned=True, keys=keys) for name in "qrs"]
    pins[1].ClearField("keys")
    daemon.pins |= {pin.pin_id: pin for pin in pins}
    session.send(pb.DaemonMessage(pins_added=pb.PinsAdded(pins=pins)))
    wait_for(lambda: {"bind_pin", "confirm_pins"} <= set(session.kinds()))
    (confirm,) = [m.confirm_pins for m in session.received if m.WhichOneof("kind") == "confirm_pins"]
    assert list(confirm.pin_ids) == ["q", "s"]
    (bind,) = [m.bind_pin for m in session.received if m.WhichOneof("kind") == "bind_pin"]
    assert bind.pin_id == "r"
    bound: list[BoundPin] = []

    def all_are_bound() -> bool:
        bound.extend(event.pin for event in link.poll() if isinstance(event, PinBound))
        return len(bound) == 3

    wait_for(all_are_bound)
    assert [pin.pin_id for pin in bound] == ["q", "r", "s"]
    assert list(bound[0].keys) == keys == list(bound[0].gpu_keys)
    wait_for(lambda: not [*link.poll(), *[None] * link.wait_for_events(0.01)])
    link.close()


def blocks_link(daemon: FakeDaemon) -> tuple[DaemonEvents, FakeSession]:
    """Return a link whose chunks are blocks, of a session without pins."""
    background = BackgroundThread("kvtier-test")
    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    hasher: Any = get_request_block_hasher(4, hash_fn)
    group = GroupShape(group_idx=0, chunk_tokens=4, hashes_per_chunk=1, window_chunks=0)
    daemon.pins.clear()
    link = events_of(daemon, PinBinder((group,), lambda: hasher, AdapterDigests(background.submit), 1000), background)
    link.start()
    return link, daemon.wait_sessions(1)


def joined_pins(*names: str, num_keys: int = 5) -> pb.DaemonMessage:
    keys = b"".join(bytes([chunk]) * 32 + bytes(4) for chunk in range(num_keys))
    pins = [pb.Pin(pin_id=name, name=name, pinned=True, joined_keys=keys, num_tokens=20) for name in names]
    return pb.DaemonMessage(pins_added=pb.PinsAdded(pins=pins))


def test_the_daemon_is_asked_for_tokens_where_keys_that_came_do_not_fit(daemon: FakeDaemon) -> None:
    link, session = blocks_link(daemon)
    message = joined_pins("q", "r")
    message.pins_added.pins.extend(joined_pins("s", num_keys=4).pins_added.pins)
    session.send(message)
    wait_for(lambda: "confirm_pins" in session.kinds())
    (confirm,) = [m.confirm_pins for m in session.received if m.WhichOneof("kind") == "confirm_pins"]
    assert (list(confirm.pin_ids), list(confirm.unknown_pin_ids)) == (["q", "r"], ["s"])
    session.send(pb.DaemonMessage(pin_added=pb.PinAdded(pin=pb.Pin(pin_id="s", tokens=range(20), pinned=True))))
    wait_for(lambda: "bind_pin" in session.kinds())
    (bind,) = [m.bind_pin for m in session.received if m.WhichOneof("kind") == "bind_pin"]
    assert (bind.pin_id, len(bind.keys)) == ("s", 5)
    link.close()


@pytest.mark.parametrize("runs", [True, False])
def test_a_scheduler_that_runs_takes_in_the_pins_of_one_message_before_the_next_ones(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, runs: bool
) -> None:
    """They are bound so quickly that one poll would have thousands, and take half a second."""
    module = kvtier_connector.session.daemon_events
    monkeypatch.setattr(module, "_HAND_OVER_S", 60.0)
    monkeypatch.setattr(module, "_RUNNING_S", 60.0 if runs else 0.0)
    link, session = blocks_link(daemon)
    collect(link, Attached, [])
    names = ["q", "r", "s"]
    for name in names:
        session.send(joined_pins(name))
    waiting = names[:1] if runs else names

    def pins() -> list[str]:
        return [event.pin.pin_id for event in list(link._events) if isinstance(event, PinBound)]

    wait_for(lambda: pins() == waiting)
    time.sleep(0.05)
    assert pins() == waiting
    taken = [event.pin.pin_id for event in link.poll() if isinstance(event, PinBound)]
    assert taken == waiting
    if runs:
        wait_for(lambda: pins() == names[1:2])
        assert len(list(link.poll())) == 1
    link.close()


def test_a_question_for_blocks_is_answered_without_the_scheduler(daemon: FakeDaemon, link: DaemonEvents) -> None:
    """vLLM polls only while it has requests."""
    session = daemon.wait_sessions(1)
    session.send(pb.DaemonMessage(device_blocks_wanted=pb.DeviceBlocksWanted(id=3, pin_ids=["p"])))
    wait_for(lambda: "device_blocks" in session.kinds())
    (answer,) = [each.device_blocks for each in session.received if each.HasField("device_blocks")]
    assert (answer.id, bool(answer.problem)) == (3, True)
