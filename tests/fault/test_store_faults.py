"""A network and a server that fail in every way, for every operation of a store: the right result or an error that
says what happened, within a bounded time and number of requests, and never wrong bytes that are taken for right ones.

The server is a real one that speaks S3, moto's or (`make test-fleet`) Ceph's; between it and the client is a proxy that
does harm.
"""

import asyncio
import os
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from kvtier.errors import RemoteStoreError, RemoteUnavailableError
from kvtier.remote import object_store
from kvtier.remote.base import RemoteStore, Version
from kvtier.remote.object_store import ObjectStore
from kvtier.remote.opening import check_conditional_writes
from tests.fakes.fault_proxy import Fault, FaultProxy, Head, Link, fault_proxy
from tests.fakes.s3_server import CREDENTIALS
from tests.fakes.s3_servers import S3_SERVERS, running_server

SMALL, OTHER, LARGE = b"1" * 100, b"2" * 100, os.urandom(9 * 1024**2)
ALWAYS = 10**6
MAX_TRIES = 7
"""Of one request: the first one and six more."""
TIMEOUT_S, RETRY_S, CALL_S = 1.0, 1.5, 4.0
"""As in the product, in the same proportions, but twenty times shorter."""

Call = Callable[["Objects"], Awaitable[object]]


@dataclass
class Objects:
    """What the operations work on: an object of each kind that is there, and the key of one that is not.

    Attributes:
        store: Its timeouts are short.
        patient: The same, as in the product: says what is there, also on a busy machine.
    """

    store: RemoteStore
    patient: RemoteStore
    version: Version
    small: str
    new: str
    large: str = "kv/large"

    async def list(self) -> object:
        found = [info async for info in self.store.list(f"{self.small.rpartition('/')[0]}/")]
        return [info.num_bytes for info in found]

    async def swap(self) -> object:
        return await self.store.swap(self.small, OTHER, self.version)

    async def get(self) -> object:
        found = await self.store.get(self.small)
        return found.data if found is not None else None

    async def head(self) -> object:
        found = await self.store.head(self.small)
        return found.num_bytes if found is not None else None


OPERATIONS: dict[str, Call] = {
    "get": Objects.get,
    "get_range": lambda objects: objects.store.get_range(objects.large, 0, len(LARGE)),
    "head": Objects.head,
    "list": Objects.list,
    "put_new": lambda objects: objects.store.put_new(objects.new, OTHER),
    "swap": Objects.swap,
    "put_stream": lambda objects: objects.store.put_stream(objects.new, pieces(LARGE)),
    "put_stream of a small object": lambda objects: objects.store.put_stream(objects.new, pieces(OTHER)),
    "delete": lambda objects: objects.store.delete(objects.small),
}
READS = {"get": SMALL, "get_range": LARGE, "head": len(SMALL), "list": [len(SMALL)]}
FAULTS = [fault for fault in Fault if fault not in (Fault.SPOIL_REQUEST, Fault.SPOIL_ANSWER)]
"""Bits are spoiled in other tests: what reads an object verifies it."""
WITHOUT_BODY = {
    Fault.CUT_REQUEST: (*READS, "delete"),
    Fault.CUT_ANSWER: ("head", "put_new", "swap", "put_stream of a small object", "delete"),
}
"""Operations of which a fault finds nothing to cut."""
CONDITIONAL = ("put_new", "swap")


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 1024**2):
        yield data[start : start + 1024**2]


@pytest.fixture(scope="module", params=S3_SERVERS)
def proxy(request: pytest.FixtureRequest) -> Iterator[FaultProxy]:
    with running_server(request.param) as url, fault_proxy(url) as proxy:
        make_large(proxy.url)
        yield proxy


def make_large(url: str) -> None:
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": url}.items():
            environment.setenv(name, value)
        asyncio.run(ObjectStore("s3://fleet/faults").put_stream("kv/large", pieces(LARGE)))


@pytest.fixture
def open_objects(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Awaitable[Objects]]]:
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": proxy.url}.items():
        monkeypatch.setenv(name, value)

    async def make() -> Objects:
        patient, folder = ObjectStore("s3://fleet/faults"), f"pins/{secrets.token_hex(4)}"
        version = await patient.put_new(f"{folder}/small", SMALL)
        assert version is not None
        with monkeypatch.context() as shorter:
            for name, seconds in {"_TIMEOUT_S": TIMEOUT_S, "_RETRY_S": RETRY_S, "_CALL_S": CALL_S}.items():
                shorter.setattr(object_store, name, seconds)
            store = ObjectStore("s3://fleet/faults")
        return Objects(store, patient, version, f"{folder}/small", f"{folder}-new/new")

    yield make
    proxy.heal()


async def outcome_of(operation: str, objects: Objects) -> object:
    """Return what an operation returned, or the error that it raised; no other one, and in a bounded time."""
    began_s = time.monotonic()
    try:
        return await OPERATIONS[operation](objects)
    except RemoteStoreError as error:
        return error
    finally:
        # More than all tries take: the machine may be busy. Of a store with the product's timeouts it says nothing.
        assert objects.store is objects.patient or time.monotonic() - began_s < 3 * CALL_S


async def check_what_is_there(operation: str, objects: Objects, outcome: object) -> None:
    """An operation that succeeded was carried out whole; one that failed, whole or not at all."""
    failed = isinstance(outcome, RemoteStoreError)
    if operation in READS:
        assert failed or outcome == READS[operation]
    small, new = await objects.patient.get(objects.small), await objects.patient.head(objects.new)
    if operation == "delete":
        assert small is None or failed
        return
    assert small is not None
    assert small.data in ((SMALL, OTHER) if operation == "swap" else (SMALL,))
    if operation == "swap" and isinstance(outcome, Version):
        assert (small.data, small.version) == (OTHER, outcome)
    if new is not None:
        written = LARGE if operation == "put_stream" else OTHER
        assert await objects.patient.get_range(objects.new, 0, len(LARGE)) == written
    if operation == "put_new" and isinstance(outcome, Version):
        assert new is not None
        assert new.version == outcome
    elif operation.startswith("put_stream") and not failed:
        assert new is not None


@pytest.mark.parametrize(
    ("operation", "fault"),
    [each for each in product(OPERATIONS, FAULTS) if each[0] not in WITHOUT_BODY.get(each[1], ())],
)
def test_a_fault_that_happens_once_is_survived_or_reported(
    operation: str, fault: Fault, proxy: FaultProxy, open_objects: Callable[[], Awaitable[Objects]]
) -> None:
    async def run() -> None:
        objects = await open_objects()
        if fault is not Fault.LATE_ANSWER:  # no other is noticed by a timeout, which a busy machine might exceed
            objects.store = objects.patient
        proxy.num_requests.clear()
        proxy.num_faults.clear()
        proxy.harm(fault)
        outcome = await outcome_of(operation, objects)
        assert proxy.num_faults == {fault: 1}
        # A large object takes four: its beginning, two parts, its end. The first swap that is refused looks why, and
        # may be tried otherwise.
        assert sum(proxy.num_requests.values()) <= {"put_stream": 6, "swap": 4}.get(operation, 3)
        proxy.heal()
        await check_what_is_there(operation, objects, outcome)
        if fault in (Fault.UNAVAILABLE, Fault.ERROR):
            assert not isinstance(outcome, RemoteStoreError)

    asyncio.run(run())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_stays_ends_every_operation_in_time_and_with_few_tries(
    fault: Fault, proxy: FaultProxy, open_objects: Callable[[], Awaitable[Objects]]
) -> None:
    """All operations at once, each on objects of its own."""

    async def run() -> None:
        all_objects = [await open_objects() for _ in OPERATIONS]
        proxy.num_requests.clear()
        proxy.num_faults.clear()
        proxy.harm(fault, ALWAYS)
        calls = [outcome_of(operation, objects) for operation, objects in zip(OPERATIONS, all_objects, strict=True)]
        outcomes = await asyncio.gather(*calls)
        assert proxy.num_faults[fault] >= len(OPERATIONS) - len(WITHOUT_BODY.get(fault, ()))
        # Of a large object two parts are tried at once.
        assert sum(proxy.num_requests.values()) <= (len(OPERATIONS) + 1) * MAX_TRIES + 2
        proxy.heal()
        for operation, objects, outcome in zip(OPERATIONS, all_objects, outcomes, strict=True):
            await check_what_is_there(operation, objects, outcome)
            if fault in (Fault.UNAVAILABLE, Fault.ERROR):
                assert isinstance(outcome, RemoteUnavailableError)

    asyncio.run(run())


@pytest.mark.parametrize("operation", CONDITIONAL)
def test_an_answer_that_is_lost_looks_like_a_lost_race_and_the_object_says_who_won(
    operation: str, proxy: FaultProxy, open_objects: Callable[[], Awaitable[Objects]]
) -> None:
    """The client tries again and meets its own write; what reads the object then finds its own bytes there."""

    async def run() -> None:
        objects = await open_objects()
        objects.store = objects.patient
        known = await objects.store.swap(objects.small, SMALL, objects.version)  # it knows how the store wants ETags
        assert known is not None
        objects.version = known
        proxy.harm(Fault.LOST_ANSWER)
        assert await OPERATIONS[operation](objects) is None
        found = await objects.store.get(objects.new if operation == "put_new" else objects.small)
        assert found is not None
        assert found.data == OTHER
        again = await objects.store.swap(objects.new if operation == "put_new" else objects.small, b"3", found.version)
        assert again is not None

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fault", "number"),
    [
        *product((Fault.LOST_ANSWER, Fault.CUT_REQUEST, Fault.UNAVAILABLE), range(4)),
        *product((Fault.CUT_ANSWER,), (1, 3)),  # those that are to be refused: the answers to the others have no body
    ],
)
def test_a_store_is_not_refused_for_a_fault_during_the_check_of_conditions(
    number: int, fault: Fault, proxy: FaultProxy, open_objects: Callable[[], Awaitable[Objects]]
) -> None:
    """Each of the four writes of the check is harmed once. A lost answer made a daemon refuse its store at a start.

    An error's text that is cut short is no answer; the daemon checks again.
    """
    seen = Counter[str]()

    def is_the_one(head: Head) -> bool:
        seen["PUT"] += head.is_conditional_write
        return head.is_conditional_write and seen["PUT"] == number + 1

    async def run() -> None:
        store = (await open_objects()).patient
        proxy.harm(fault, which=is_the_one)
        try:
            await check_conditional_writes(store)
        except RemoteUnavailableError:
            assert fault is Fault.CUT_ANSWER
            await check_conditional_writes(store)
        assert [info.key async for info in store.list("checks/")] == []

    proxy.num_faults.clear()
    asyncio.run(run())
    # Where a swap is refused until its tag is bare, the fourth write is not yet the one that is to be refused.
    assert proxy.num_faults[fault] == 1 or (fault, number) == (Fault.CUT_ANSWER, 3)


@pytest.mark.parametrize("link", [Link.REFUSES, Link.SILENT])
def test_a_partition_is_noticed_in_time_and_leaves_nothing_in_part(
    link: Link, proxy: FaultProxy, open_objects: Callable[[], Awaitable[Objects]]
) -> None:
    async def run() -> None:
        all_objects = [await open_objects() for _ in OPERATIONS]
        proxy.cut_off(link)
        calls = [outcome_of(operation, objects) for operation, objects in zip(OPERATIONS, all_objects, strict=True)]
        outcomes = await asyncio.gather(*calls)
        proxy.heal()
        for operation, objects, outcome in zip(OPERATIONS, all_objects, outcomes, strict=True):
            assert isinstance(outcome, RemoteUnavailableError)
            await check_what_is_there(operation, objects, outcome)
            objects.store = objects.patient
            assert not isinstance(await outcome_of(operation, objects), RemoteStoreError), "it works again"

    asyncio.run(run())


def test_a_range_over_a_slow_link_comes_as_long_as_bytes_come(
    proxy: FaultProxy, open_objects: Callable[[], Awaitable[Objects]]
) -> None:
    """Each read has to bring something within the timeout, not the whole range: many ranges share a link."""

    async def run() -> None:
        objects = await open_objects()
        proxy.bytes_per_s = int(len(LARGE) / (3 * TIMEOUT_S))
        assert await objects.store.get_range(objects.large, 0, len(LARGE)) == LARGE

    asyncio.run(run())


def test_an_upload_may_take_longer_than_a_call_when_its_source_is_slow(
    open_objects: Callable[[], Awaitable[Objects]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`remote.upload_bytes_per_s` makes the source slow. Every upload of more than 80 s failed, and for ever."""

    async def slowly() -> AsyncIterator[bytes]:
        for start in range(0, len(LARGE), 1024**2):
            await asyncio.sleep(0.5)
            yield LARGE[start : start + 1024**2]

    async def run() -> None:
        objects = await open_objects()
        monkeypatch.setattr(object_store, "_CALL_S", 3.0)
        await objects.patient.put_stream(objects.new, slowly())
        assert await objects.patient.get_range(objects.new, 0, len(LARGE)) == LARGE

    asyncio.run(run())


def test_a_source_that_fails_says_so_itself_also_when_the_store_has_failed_before(
    proxy: FaultProxy, open_objects: Callable[[], Awaitable[Objects]]
) -> None:
    """When the store had failed, GeneratorExit came out of `put_stream`, which no `except Exception` catches."""

    async def many() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield LARGE[: 1024**2]

    async def run() -> None:
        objects = await open_objects()
        proxy.harm(Fault.CUT_REQUEST, ALWAYS, lambda head: head.words[0] == "PUT")
        with pytest.raises(RemoteUnavailableError):
            await objects.store.put_stream(objects.new, many())
        proxy.heal()
        assert await objects.patient.head(objects.new) is None

    asyncio.run(run())


@pytest.mark.parametrize("num_bytes", [0, 1, 8 * 1024**2 - 1, 8 * 1024**2, 8 * 1024**2 + 1])
def test_small_objects_go_in_one_request(
    num_bytes: int, proxy: FaultProxy, open_objects: Callable[[], Awaitable[Objects]]
) -> None:
    async def run() -> None:
        objects, data = await open_objects(), LARGE[:num_bytes]
        proxy.num_requests.clear()
        await objects.patient.put_stream(objects.new, pieces(data))
        is_small = num_bytes < 8 * 1024**2
        assert (sum(proxy.num_requests.values()) == 1) == is_small
        assert await objects.patient.get_range(objects.new, 0, num_bytes + 1) == data if num_bytes else True

    asyncio.run(run())


@pytest.mark.parametrize("proxy", ["moto"], indirect=True)
def test_a_store_that_wants_tags_without_quotes_gets_them(open_objects: Callable[[], Awaitable[Objects]]) -> None:
    """Ceph's gateway of 2021 to 2024 refuses each `If-Match` as HTTP has it, and takes the bare tag.

    `make test-fleet` runs such a gateway.
    """

    async def run() -> None:
        objects = await open_objects()
        store, sent = objects.patient, list[str]()
        assert isinstance(store, ObjectStore)
        put = store._put

        async def bare_only(key: str, data: bytes, mode: Any) -> Version | None:
            sent.append(mode["e_tag"])
            if mode["e_tag"].startswith('"'):
                return None
            return await put(key, data, {"e_tag": f'"{mode["e_tag"]}"'})

        store._put = bare_only  # type: ignore[method-assign]
        second = await store.swap(objects.small, OTHER, objects.version)
        assert second is not None
        assert await store.swap(objects.small, SMALL, objects.version) is None
        assert await store.swap(objects.small, SMALL, second) is not None
        assert [tag.startswith('"') for tag in sent] == [True, False, False, False]

    asyncio.run(run())
