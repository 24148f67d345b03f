"""Pins of LMCache's coordinator become pins of the daemon, and end with them."""

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier._pb import cache_pb2
from kvtier._pb import engine_pb2 as pb
from kvtier.client.admin import AdminClient
from kvtier.config import DaemonConfig
from kvtier.core.layout import ChunkKey
from kvtier.errors import KvtierError
from kvtier_lmcache.adapter_settings import AdapterSettings
from kvtier_lmcache.coordinator_pins import CoordinatorPins, PinnedObject
from kvtier_lmcache.object_layouts import chunk_key_of, pin_model_of
from kvtier_lmcache.object_space import ObjectSpace
from kvtier_lmcache.space_pins import PinChanges, SpacePins, pin_tokens_of
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


def test_a_pin_that_was_never_bound_is_made_again_at_once(tmp_path: Path) -> None:
    """It has the same name: it was pinned, which changed nothing, and then ended, until the next question."""
    config = config_in(tmp_path, host_bytes=8 * MIB)
    hashes, objects = _objects(2)
    with (
        caching_daemon(config),
        pin_coordinator() as coordinator,
        open_space(config.server.socket, OBJECT_BYTES) as space,
        AdminClient(config.server.socket) as admin,
    ):
        coordinator.hashes = hashes
        wait_for(lambda: space.pins.changes([]) is not None)
        name = space.pins.expect(sorted(objects))
        space.pins.refused(name)  # as if an earlier process had pinned it and ended
        tokens, model = pin_tokens_of(sorted(objects)), pin_model_of(space.layout)
        admin.pin(cache_pb2.PinRequest(name=name, tokens=tokens, model=model))
        wait_for(lambda: space.pins.changes([]) == PinChanges(ended=[name]))
        with _following(config, coordinator, space):
            wait_for(lambda: [bool(each.bindings) for each in admin.list()] == [True])
        assert [(each.name, each.pinned) for each in admin.list()] == [(name, True)]


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
