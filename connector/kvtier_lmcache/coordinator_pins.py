"""Pins of LMCache's coordinator (`/cache/pins`, by token ids), kept as pins of the daemon."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from kvtier._pb import cache_pb2
from kvtier.client.admin import AdminClient
from kvtier.core.layout import ChunkKey
from kvtier.errors import KvtierError, PromptNotFoundError, QuotaExceededError
from kvtier_lmcache.adapter_settings import AdapterSettings
from kvtier_lmcache.object_layouts import ObjectFamily, chunk_key_of, family_of, pin_model_of
from kvtier_lmcache.object_space import ObjectSpace
from kvtier_lmcache.space_pins import PinChanges, pin_tokens_of

_PAGE = 10_000
_HTTP_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 15.0
"""Longer than one call to the coordinator or the daemon takes; an apply of many pins may take minutes."""
_MAX_READS = 3
MAX_PINNED = 100_000
"""Objects of one pin; more become several."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PinnedObject:
    """A key of the coordinator's list. It covers the object of the same tokens in every object group."""

    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int
    cache_salt: str


class CoordinatorPins:
    """Asks the coordinator every few seconds what is pinned, and pins that in the daemon: what it evicts is the rest.

    The coordinator only leaves pinned objects out of its own plan. When it does not answer, what is pinned stays so;
    when the adapter does not run, too: the daemon keeps pins durably.

    Args:
        url: The coordinator's.
        settings: How often to ask, and where the daemon is.
        spaces: Returns the spaces that are open.
    """

    def __init__(self, url: str, settings: AdapterSettings, spaces: Callable[[], Sequence[ObjectSpace]]) -> None:
        self._url, self._settings, self._spaces = url, settings, spaces
        self._stop = threading.Event()
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name="kvtier-pins", daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def close(self) -> None:
        """Stop after the question that is open; one that takes longer than a few seconds ends with the process."""
        self._stop.set()
        self._thread.join(_CLOSE_TIMEOUT_S)

    @property
    def problem(self) -> str:
        """Why the last attempt failed; empty if it did not. Any thread."""
        return self._problem

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=_HTTP_TIMEOUT_S, trust_env=False) as client:
            while not self._stop.is_set():
                try:
                    if spaces := self._spaces():
                        self._follow(read_pinned(client), spaces)
                    self._report("")
                except Exception as exc:  # a cache failure never reaches LMCache, whatever it is
                    self._report(f"{exc!r}")
                self._stop.wait(self._settings.pin_poll_s)

    def _report(self, problem: str) -> None:
        if problem and problem != self._problem:
            logger.warning("kvtier: pins of LMCache's coordinator cannot be followed: %s", problem)
        self._problem = problem

    def _follow(self, pinned: Sequence[PinnedObject], spaces: Iterable[ObjectSpace]) -> None:
        """Bring the pins of each space up to date.

        Raises:
            KvtierError: Those of a space are not; the others are.
        """
        problem: KvtierError | None = None
        for space in spaces:
            changes = space.pins.changes(_keys_in(space.layout.family, pinned))
            if changes is None or changes == PinChanges():
                continue
            try:
                self._apply(space, changes)
            except KvtierError as exc:
                problem = problem or exc
        if problem is not None:
            raise problem

    def _apply(self, space: ObjectSpace, changes: PinChanges) -> None:
        space.answer(changes.bound)
        with AdminClient(self._settings.socket, daemon_uid=self._settings.daemon_uid) as admin:
            for name in changes.ended:
                self._unpin(admin, name)
            requests = [
                cache_pb2.PinRequest(
                    name=space.pins.expect(keys), tokens=pin_tokens_of(keys), model=pin_model_of(space.layout)
                )
                for keys in (
                    changes.added[start : start + MAX_PINNED] for start in range(0, len(changes.added), MAX_PINNED)
                )
            ]
            try:
                self._pin(admin, requests, changes.replaced)
            except KvtierError:
                for request in requests:
                    space.pins.refused(request.name)
                raise
            for name in changes.replaced:
                self._unpin(admin, name)

    def _pin(self, admin: AdminClient, requests: Sequence[cache_pb2.PinRequest], replaced: Sequence[str]) -> None:
        """Pin beside the pins that are replaced or, where the disk has no place for both, in their place."""
        try:
            for request in requests:
                admin.pin(request)
        except QuotaExceededError:
            if not replaced:
                raise
            pins = [cache_pb2.ApplyMessage(pin=request) for request in requests]
            unpins = [cache_pb2.ApplyMessage(unpin=name) for name in replaced]
            admin.apply([cache_pb2.ApplyMessage(start=cache_pb2.ApplyStart()), *pins, *unpins])
        for request in requests:
            logger.info("kvtier: pinned name=%s num_objects=%d", request.name, len(request.tokens))

    def _unpin(self, admin: AdminClient, name: str) -> None:
        with contextlib.suppress(PromptNotFoundError):  # an adapter beside this one was first
            admin.unpin(name, forget=True)
        logger.info("kvtier: unpinned name=%s", name)


def _keys_in(family: ObjectFamily, pinned: Iterable[PinnedObject]) -> set[ChunkKey]:
    """Return the keys of pinned objects in a family, whichever object group the coordinator named."""
    of_group = (
        PinnedObject(each.chunk_hash, each.model_name, each.kv_rank, family.group_id, each.cache_salt)
        for each in pinned
    )
    return {chunk_key_of(each) for each in of_group if family_of(each) == family}


def read_pinned(client: httpx.Client) -> list[PinnedObject]:
    """Return all that the coordinator has pinned.

    Raises:
        httpx.HTTPError: It does not answer, or with an error.
        KvtierError: Its list changed each time that it was read.
    """
    for _ in range(_MAX_READS):
        if (pinned := _read_pages(client)) is not None:
            return pinned
    raise KvtierError("the list of pins changed while it was read")


def _read_pages(client: httpx.Client) -> list[PinnedObject] | None:
    """Read the list once; None if it changed: what is unpinned moves those behind it, and one would be left out.

    So each page begins with the last object of the one before.
    """
    pinned, total = list[PinnedObject](), 1
    while len(pinned) < total:
        params = {"offset": max(0, len(pinned) - 1), "limit": _PAGE}
        answer: dict[str, Any] = client.get("/cache/pins", params=params).raise_for_status().json()
        page, total = [_pinned_object(each["key"]) for each in answer["pins"]], answer["total"]
        last = pinned[-1:]
        if page[: len(last)] != last or (len(page) == len(last) and len(pinned) < total):
            return None
        pinned += page[len(last) :]
    return pinned


def _pinned_object(key: dict[str, Any]) -> PinnedObject:
    return PinnedObject(
        bytes.fromhex(key["chunk_hash_hex"]),
        key["model_name"],
        key["kv_rank"],
        key["object_group_id"],
        key["cache_salt"],
    )
