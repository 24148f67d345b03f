"""Pins of LMCache's coordinator become pins of the daemon, and end with them."""

import contextlib
import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from kvtier._pb import cache_pb2
from kvtier._pb import engine_pb2 as pb
from kvtier.client.admin import AdminClient
from kvtier.config import DaemonConfig
from kvtier.core.layout import ChunkKey
from kvtier.errors import KvtierError
from kvtier_lmcache import coordinator_pins
from kvtier_lmcache.adapter_settings import AdapterSettings
from kvtier_lmcache.coordinator_pins import CoordinatorPins, PinnedObject, read_pinned
from kvtier_lmcache.object_layouts import chunk_key_of, pin_model_of
from kvtier_lmcache.object_space import ObjectSpace
from kvtier_lmcache.space_pins import PinChanges, SpacePins, pin_name_of, pin_tokens_of
from tests.fakes.caching_daemon import caching_daemon
from tests.fakes.object_client import ObjectClient, open_space, some_objects
from tests.fakes.pin_coordinator import PinCoordinator, pin_coordinator
from tests.fakes.scripted_engine import chunk_key, config_in
from tests.fakes.waiting import wait_for

KIB, MIB = 1 << 10, 1 << 20
OBJECT_BYTES = 256 * KIB


def _objects(num_objects: int) -> tuple[list[bytes], dict[ChunkKey, bytes]]:
    """Return chunk hashes of LMCache and their objects."""
    hashes = [bytes([number]) * 8 for number in range(num_objects)]
    keys = [chunk_key_of(PinnedObject(each, "model", 1 << 24, 0, "")) for each in hashes]
    return hashes, dict(zip(keys, some_objects(num_objects, OBJECT_BYTES, seed=3).values(), strict=True))


@contextlib.contextmanager
def _following(config: DaemonConfig, coordinator: PinCoordinator, *spaces: ObjectSpace) -> Iterator[CoordinatorPins]:
    settings = AdapterSettings(socket=config.server.socket, pin_poll_s=0.05)
    pins = CoordinatorPins(coordinator.url, settings, lambda: spaces)
    pins.start()
    try:
        yield pins
    finally:
        pins.close()


def _pinned(config: DaemonConfig) -> list[cache_pb2.PromptStatus]:
    with AdminClient(config.server.socket) as client:
        return [each for each in client.list() if each.pinned]


def test_pinned_objects_outlive_a_flood_and_can_be_evicted_when_unpinned(tmp_path: Path) -> None:
    config = config_in(tmp_path, host_bytes=4 * MIB, disk_bytes=8 * MIB)
    hashes, objects = _objects(7)
    pinned = {key: data for number, (key, data) in enumerate(objects.items()) if number < 4}
    with (
        caching_daemon(config),
        pin_coordinator() as coordinator,
        open_space(config.server.socket, OBJECT_BYTES) as space,
        _following(config, coordinator, space),
    ):
        client = ObjectClient(space)
        assert client.store(objects)
        coordinator.hashes = hashes[:4]  # two pages
        wait_for(lambda: [each.state for each in _pinned(config)] == [cache_pb2.PromptStatus.DURABLE])
        others = itertools.count(100)

        def are_evicted() -> bool:
            client.store(some_objects(8, OBJECT_BYTES, seed=next(others)))
            return client.lookup([*objects]) == [0, 1, 2, 3]

        wait_for(are_evicted, 60)
        assert client.load([*pinned]) == dict(enumerate(pinned.values()))
        coordinator.hashes = []
        wait_for(lambda: not _pinned(config))
        with AdminClient(config.server.socket) as admin:
            admin.evict_all()  # of what no pin has
        wait_for(lambda: client.lookup([*pinned]) == [])


def test_what_is_pinned_before_it_is_stored_is_durable_when_it_is(tmp_path: Path) -> None:
    config = config_in(tmp_path, host_bytes=8 * MIB)
    hashes, objects = _objects(3)
    with (
        caching_daemon(config),
        pin_coordinator() as coordinator,
        open_space(config.server.socket, OBJECT_BYTES) as space,
        _following(config, coordinator, space),
    ):
        coordinator.hashes = hashes
        wait_for(lambda: len(_pinned(config)) == 1)
        assert ObjectClient(space).store(objects)
        wait_for(lambda: [each.state for each in _pinned(config)] == [cache_pb2.PromptStatus.DURABLE])


def test_pins_follow_changes_errors_and_restarts(tmp_path: Path) -> None:
    """A coordinator that fails changes nothing; one pin less leaves the others; a restart makes no second pin."""
    config = config_in(tmp_path, host_bytes=8 * MIB)
    hashes, objects = _objects(4)
    with caching_daemon(config), pin_coordinator() as coordinator:
        coordinator.hashes = hashes
        with (
            open_space(config.server.socket, OBJECT_BYTES) as space,
            _following(config, coordinator, space) as pins,
        ):
            assert ObjectClient(space).store(objects)
            wait_for(lambda: [each.state for each in _pinned(config)] == [cache_pb2.PromptStatus.DURABLE])
            first = _pinned(config)[0].name
            coordinator.hashes, coordinator.fails = [], True
            wait_for(lambda: "500" in pins.problem)
            assert [each.name for each in _pinned(config)] == [first]
            coordinator.hashes, coordinator.fails = hashes[1:], False
            wait_for(lambda: len(_pinned(config)) == 1 and _pinned(config)[0].name != first)
            coordinator.hashes = hashes  # one more: the pin that stands stays, the new one has its own
            wait_for(lambda: len(_pinned(config)) == 2)
            names = {each.name for each in _pinned(config)}
            with AdminClient(config.server.socket) as admin:
                assert {each.name for each in admin.list()} == names, "what was unpinned is forgotten"
        with (
            open_space(config.server.socket, OBJECT_BYTES) as space,
            _following(config, coordinator, space) as pins,
        ):
            wait_for(lambda: space.is_serving)
            wait_for(lambda: space.pins.changes(list(objects)) is not None)
            changes = space.pins.changes(list(objects))
            assert changes is not None
            assert (changes.added, changes.ended) == ([], [])
            assert {each.name for each in _pinned(config)} == names


def test_pins_that_are_asked_for_together_are_all_bound() -> None:
    """More objects than one pin may have: the first pin arrived after the second was asked for, was bound to nothing,
    and was ended and made again at each question."""
    pins = SpacePins()
    pins.begin(pb.Welcome(namespace_id="namespace"))
    keys = [chunk_key(number) for number in range(4)]
    names = [pins.expect(keys[:2]), pins.expect(keys[2:])]
    arrived = [pb.Pin(pin_id=name, name=name, pinned=True) for name in names]
    bound = [answer.bind_pin for pin in arrived for answer in pins.arrived([pin])]
    assert [[*each.keys] for each in bound] == [keys[:2], keys[2:]]
    changes = pins.changes(keys)
    assert changes is not None
    assert (changes.added, changes.ended) == ([], [])


def test_without_a_session_nothing_is_pinned() -> None:
    """The daemon was restarted between question and pin: a pin without a namespace in its name was no one's, and stood
    for good."""
    pins = SpacePins()
    pins.begin(pb.Welcome(namespace_id="namespace"))
    assert pins.changes([chunk_key(0)]) == PinChanges(added=[chunk_key(0)])
    pins.end()
    with pytest.raises(KvtierError, match="the session has ended"):
        pins.expect([chunk_key(0)])


def pin_of(name: str, keys: Sequence[ChunkKey], *, with_keys: bool = False, pinned: bool = True) -> pb.Pin:
    """A pin as the daemon sends it."""
    sent = keys if with_keys else ()
    return pb.Pin(pin_id=f"id of {name}", name=name, tokens=pin_tokens_of(keys), keys=sent, pinned=pinned)


def bound_keys(answers: Iterable[pb.EngineMessage]) -> list[list[ChunkKey]]:
    return [[*answer.bind_pin.keys] for answer in answers]


def test_a_pin_that_another_adapter_makes_is_bound_and_ended_with_it() -> None:
    """It came without keys, as a new pin does, and was taken for one of nothing: it ended, and was made again, at each
    question."""
    pins, keys = SpacePins(), sorted(map(chunk_key, range(4)))
    pins.begin(pb.Welcome(namespace_id="namespace"))
    name = pin_name_of("namespace", keys[:3])
    assert pins.arrived([pin_of(name, keys[:3])]) == []
    changes = pins.changes(keys)
    assert changes is not None
    assert bound_keys(changes.bound) == [keys[:3]]
    assert (changes.ended, changes.added, changes.replaced) == ([], keys[3:], [])
    assert pins.keys_of([f"id of {name}"])
    assert pins.changes(keys[:3]) == PinChanges()
    assert pins.changes([]) == PinChanges(ended=[name])


@pytest.mark.parametrize(("wanted", "ended", "replaced"), [(slice(0), 1, 0), (slice(1, 4), 0, 1)])
def test_a_pin_without_keys_is_not_judged_by_an_older_answer(wanted: slice, ended: int, replaced: int) -> None:
    """Another adapter made it while this one asked the coordinator; else it stands since one ended that had not bound
    it."""
    pins, keys = SpacePins(), sorted(map(chunk_key, range(4)))
    name = pin_name_of("namespace", keys)
    pins.begin(pb.Welcome(namespace_id="namespace", pins=[pin_of(name, keys)]))
    assert pins.changes(keys[wanted]) == PinChanges(added=keys[wanted])
    expected = PinChanges(ended=[name] * ended, added=keys[wanted], replaced=[name] * replaced)
    assert pins.changes(keys[wanted]) == expected


def test_a_pin_that_is_announced_again_keeps_its_keys() -> None:
    """`kvtier set` of its priority, after a restart of LMCache: it ended and was made again, with the default one."""
    pins, keys = SpacePins(), sorted(map(chunk_key, range(4)))
    name = pin_name_of("namespace", keys)
    pins.begin(pb.Welcome(namespace_id="namespace", pins=[pin_of(name, keys, with_keys=True)]))
    assert pins.changes(keys) == PinChanges()
    pins.arrived([pin_of(name, keys)])
    assert pins.changes(keys) == PinChanges()
    pins.arrived([pin_of(name, keys, pinned=False)])
    assert pins.changes(keys) == PinChanges(ended=[name], added=keys)


def test_adapters_beside_one_another_make_one_pin_that_stays(tmp_path: Path) -> None:
    """Two of LMCache's servers on one daemon: each ended what the other had made, and made it again."""
    config = config_in(tmp_path, host_bytes=8 * MIB)
    hashes, objects = _objects(2)
    with (
        caching_daemon(config),
        pin_coordinator() as coordinator,
        open_space(config.server.socket, OBJECT_BYTES) as space,
        open_space(config.server.socket, OBJECT_BYTES) as beside,
        _following(config, coordinator, space),
    ):
        assert ObjectClient(space).store(objects)
        wait_for(lambda: space.is_serving and beside.is_serving)
        coordinator.hashes = hashes
        wait_for(lambda: [each.state for each in _pinned(config)] == [cache_pb2.PromptStatus.DURABLE])
        (first,) = _pinned(config)
        with _following(config, coordinator, beside):
            num_pages = coordinator.num_pages
            wait_for(lambda: coordinator.num_pages > num_pages + 8)
            assert [each.pin_id for each in _pinned(config)] == [first.pin_id]
            coordinator.hashes = []
            wait_for(lambda: not _pinned(config))


def test_a_pin_that_was_never_bound_is_bound_when_it_is_wanted(tmp_path: Path) -> None:
    """An adapter made it, and ended."""
    config = config_in(tmp_path, host_bytes=8 * MIB)
    hashes, objects = _objects(2)
    keys = sorted(objects)
    with caching_daemon(config), pin_coordinator() as coordinator, AdminClient(config.server.socket) as admin:
        coordinator.hashes = hashes
        with open_space(config.server.socket, OBJECT_BYTES) as space:
            wait_for(lambda: space.pins.changes([]) is not None)
            name, model = space.pins.expect(keys), pin_model_of(space.layout)
        admin.pin(cache_pb2.PinRequest(name=name, tokens=pin_tokens_of(keys), model=model))
        (made,) = admin.list()
        with open_space(config.server.socket, OBJECT_BYTES) as space, _following(config, coordinator, space):
            wait_for(lambda: [bool(each.bindings) for each in admin.list()] == [True])
        assert [(each.name, each.pin_id, each.pinned) for each in admin.list()] == [(name, made.pin_id, True)]


def test_a_list_that_becomes_shorter_while_it_is_read_is_read_again() -> None:
    """What was unpinned moved the others, and the first one of the next page was left out: its pin ended."""
    coordinator = PinCoordinator("http://coordinator")
    coordinator.hashes = [bytes([number]) * 8 for number in range(8)]

    def answer(request: httpx.Request) -> httpx.Response:
        page = coordinator.page(int(request.url.params["offset"]), int(request.url.params["limit"]))
        for number in unpinned:
            coordinator.hashes.remove(bytes([number]) * 8)
            coordinator.hashes.append(bytes([number + 100]) * 8)  # as many as before
            break
        del unpinned[:1]
        return httpx.Response(200, json=page)

    client = httpx.Client(base_url=coordinator.url, transport=httpx.MockTransport(answer))
    unpinned = [1]
    assert [each.chunk_hash for each in read_pinned(client)] == coordinator.hashes
    unpinned = [*range(2, 8)]
    with pytest.raises(KvtierError, match="changed"):
        read_pinned(client)
    coordinator.hashes = []
    unpinned = []
    assert read_pinned(client) == []


def test_a_pin_that_fits_only_in_place_of_an_ended_one_is_made(tmp_path: Path) -> None:
    """It was refused at each question, and before anything else: so the ended one never ended."""
    config = config_in(tmp_path, host_bytes=8 * MIB, disk_bytes=8 * MIB)
    hashes, _ = _objects(40)
    with (
        caching_daemon(config),
        pin_coordinator() as coordinator,
        open_space(config.server.socket, OBJECT_BYTES) as space,
        _following(config, coordinator, space),
    ):
        coordinator.hashes = hashes[:20]
        wait_for(lambda: len(_pinned(config)) == 1)
        (first,) = _pinned(config)
        coordinator.hashes = hashes[20:]
        wait_for(lambda: [each.name == first.name for each in _pinned(config)] == [False])
        (second,) = _pinned(config)
        coordinator.hashes = hashes[21:]  # a part of it stays
        wait_for(lambda: [each.name == second.name for each in _pinned(config)] == [False])
        wait_for(lambda: [[binding.num_chunks for binding in each.bindings] for each in _pinned(config)] == [[19]])
        with AdminClient(config.server.socket) as admin:
            wait_for(lambda: len(admin.list()) == 1)


def test_a_layout_whose_pin_is_refused_keeps_no_other_from_its_pins(tmp_path: Path) -> None:
    config = config_in(tmp_path, host_bytes=8 * MIB, disk_bytes=8 * MIB)
    hashes, _ = _objects(20)
    with (
        caching_daemon(config),
        pin_coordinator() as coordinator,
        open_space(config.server.socket, 4 * OBJECT_BYTES) as large,
        open_space(config.server.socket, OBJECT_BYTES) as small,
        _following(config, coordinator, large, small) as pins,
    ):
        coordinator.hashes = hashes
        wait_for(lambda: [each.model for each in _pinned(config)] == [pin_model_of(small.layout)])
        wait_for(lambda: "QuotaExceededError" in pins.problem)


def test_closing_does_not_wait_for_a_question_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache's server did not end while the daemon did not answer."""
    monkeypatch.setattr(coordinator_pins, "_CLOSE_TIMEOUT_S", 0.05)
    is_asking, goes_on, is_closed = threading.Event(), threading.Event(), threading.Event()

    def hang() -> Sequence[ObjectSpace]:
        is_asking.set()
        goes_on.wait(30)
        return []

    pins = CoordinatorPins("http://127.0.0.1:9", AdapterSettings(socket=tmp_path / "s", pin_poll_s=0.05), hang)
    pins.start()
    assert is_asking.wait(30)

    def close() -> None:
        pins.close()
        is_closed.set()

    closing = threading.Thread(target=close)
    closing.start()
    try:
        assert is_closed.wait(10)
    finally:
        goes_on.set()
        closing.join(30)
