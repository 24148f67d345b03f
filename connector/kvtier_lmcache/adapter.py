"""The adapter that LMCache loads: `{"type": "plugin", "module_path": "kvtier_lmcache", ...}`."""

import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface, L2TaskId
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

from kvtier.core.layout import ChunkKey
from kvtier_lmcache.adapter_settings import parse_adapter_settings
from kvtier_lmcache.coordinator_pins import CoordinatorPins
from kvtier_lmcache.object_layouts import ObjectFamily, ObjectLayout, chunk_key_of, family_of, parts_of
from kvtier_lmcache.object_space import ObjectSpace
from kvtier_lmcache.task_results import Parts, TaskResults

MAX_SPACES = 64
"""Layouts that one server serves: each has a session and an arena. Objects of others are not cached."""

logger = logging.getLogger(__name__)


class KVTierL2Adapter(L2AdapterInterface):
    """LMCache's L2 tier on a kvtier daemon of this host. Thread-safe; no call waits for the daemon.

    The daemon bounds its disk and evicts by itself, so LMCache knows no capacity, and `delete` does nothing. A
    load takes leases of its own, so `submit_unlock` does nothing: what is evicted between lookup and load is a miss.

    Args:
        params: `adapter_params`, of which `AdapterSettings` says what they are.

    Raises:
        ConfigError: A parameter is unknown or unusable.
    """

    def __init__(self, params: Mapping[str, Any], **_: Any) -> None:
        super().__init__()
        self._settings = parse_adapter_settings(params)
        self._store_event, self._lookup_event, self._load_event = (create_event_notifier() for _ in range(3))
        self._stored = TaskResults[L2StoreResult](self._store_event.notify)
        self._found = TaskResults[Bitmap](self._lookup_event.notify)
        self._loaded = TaskResults[Bitmap](self._load_event.notify)
        self._ids = itertools.count()
        self._lock = threading.Lock()  # protects the next four
        self._spaces: dict[ObjectLayout, ObjectSpace] = {}
        self._with_objects: dict[ObjectSpace, None] = {}  # of which objects came; lookups may describe others
        self._of_family: dict[ObjectFamily, ObjectSpace] = {}  # of the objects that came last, else of the first lookup
        self._names: dict[ChunkKey, tuple[ObjectKey, int]] = {}  # stored by this process and still held, with sizes
        url = self._settings.coordinator_url
        self._pins = None if url is None else CoordinatorPins(url, self._settings, self._spaces_with_objects)
        if self._pins is not None:
            self._pins.start()

    def get_store_event_fd(self) -> int:
        """See the base class."""
        return int(self._store_event.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """See the base class."""
        return int(self._lookup_event.fileno())

    def get_load_event_fd(self) -> int:
        """See the base class."""
        return int(self._load_event.fileno())

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        """See the base class."""
        task_id = next(self._ids)
        places = self._by_space(keys, objects)
        is_cached = sum(map(len, places.values())) == len(keys)

        def end(parts: list[tuple[int, bool]]) -> None:
            num_bytes = sum(stored_bytes for stored_bytes, _ in parts)
            is_complete = is_cached and all(is_stored for _, is_stored in parts)
            self._stored.put(task_id, L2StoreResult(is_complete, num_bytes))

        parts = Parts[tuple[int, bool]](len(places), end)
        for space, indexes in places.items():
            self._store(space, [keys[index] for index in indexes], [objects[index] for index in indexes], parts)
        return task_id

    def pop_completed_store_tasks(self) -> dict[L2TaskId, L2StoreResult]:
        """See the base class."""
        return self._stored.take_all()

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> L2TaskId:
        """See the base class. The answer is there on return, except before the first one of a layout."""
        task_id = next(self._ids)
        places: dict[ObjectSpace, list[int]] = {}
        for index, key in enumerate(keys):
            if (space := self._space_to_ask(key, group_layout_descs.get(key.object_group_id))) is not None:
                places.setdefault(space, []).append(index)
        parts = self._bitmap_parts(len(keys), len(places), lambda bitmap: self._found.put(task_id, bitmap))
        for space, indexes in places.items():
            space.lookup([chunk_key_of(keys[index]) for index in indexes], _add_places(parts, indexes))
        return task_id

    def query_lookup_and_lock_result(self, task_id: L2TaskId) -> Bitmap | None:
        """See the base class."""
        return self._found.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Do nothing: a lookup locks nothing."""

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        """See the base class."""
        task_id = next(self._ids)
        places = self._by_space(keys, objects)

        def end(bitmap: Bitmap) -> None:
            loaded = [keys[index] for index in bitmap.get_indices_list()]
            try:
                if loaded:
                    self._notify_keys_accessed(loaded)
            finally:  # what a listener does not take ends the task, too
                self._loaded.put(task_id, bitmap)

        parts = self._bitmap_parts(len(keys), len(places), end)
        for space, indexes in places.items():
            addresses = [objects[index].data_ptr for index in indexes]
            space.load([chunk_key_of(keys[index]) for index in indexes], addresses, _add_places(parts, indexes))
        return task_id

    def query_load_result(self, task_id: L2TaskId) -> Bitmap | None:
        """See the base class."""
        return self._loaded.take(task_id)

    def get_usage(self) -> AdapterUsage:
        """Return what the daemon holds, also of what was stored before this process; salts only of this process."""
        usage = super().get_usage()
        return AdapterUsage(sum(space.held_bytes for space in self._open_spaces()), 0, usage.bytes_by_cache_salt)

    def report_status(self) -> dict[str, Any]:
        """Return whether the daemon serves, and what it holds, for each layout."""
        spaces = self._open_spaces()
        return {
            "is_healthy": all(space.is_serving for space in spaces),
            "type": type(self).__name__,
            "socket": str(self._settings.socket),
            "pin_problem": "" if self._pins is None else self._pins.problem,
            "spaces": [
                {
                    "model": space.layout.family.model_name,
                    "object_bytes": space.layout.object_bytes,
                    "is_serving": space.is_serving,
                    "held_bytes": space.held_bytes,
                    "num_late": space.num_late,
                }
                for space in spaces
            ],
        }

    def close(self) -> None:
        """End all sessions; open tasks fail."""
        if self._pins is not None:
            self._pins.close()
        for space in self._open_spaces():
            space.close()
        for event in (self._store_event, self._lookup_event, self._load_event):
            event.close()

    def _open_spaces(self) -> list[ObjectSpace]:
        with self._lock:
            return [*self._spaces.values()]

    def _spaces_with_objects(self) -> list[ObjectSpace]:
        """Return those that get pins: what a lookup describes is not what is stored if LMCache has a serializer."""
        with self._lock:
            return [*self._with_objects]

    def _store(
        self, space: ObjectSpace, keys: list[ObjectKey], objects: list[MemoryObj], parts: Parts[tuple[int, bool]]
    ) -> None:
        names = {chunk_key_of(key): key for key in keys}
        object_bytes = space.layout.object_bytes

        def end(stored: list[ChunkKey], is_complete: bool) -> None:
            stored_bytes = len(stored) * object_bytes
            try:
                if stored:
                    with self._lock:
                        self._names.update((key, (names[key], object_bytes)) for key in stored)
                    self._notify_keys_stored([names[key] for key in stored], [object_bytes] * len(stored))
            finally:  # what a listener does not take ends the task, too
                parts.add((stored_bytes, is_complete))

        space.store([chunk_key_of(key) for key in keys], [each.data_ptr for each in objects], end)

    def _evicted(self, keys: Sequence[ChunkKey]) -> None:
        """Tell LMCache that objects are gone, as far as it knows them. A space's thread."""
        with self._lock:
            gone = [self._names.pop(key) for key in keys if key in self._names]
        if gone:
            names, sizes = zip(*gone, strict=True)
            self._notify_keys_deleted([*names], [*sizes])

    def _by_space(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> dict[ObjectSpace, list[int]]:
        """Return which objects are of which space, without those of none."""
        places: dict[ObjectSpace, list[int]] = {}
        for index, (key, each) in enumerate(zip(keys, objects, strict=True)):
            facts = each.metadata
            shapes, dtypes = facts.shapes or [facts.shape], facts.dtypes or [facts.dtype]
            layout = ObjectLayout(family_of(key), parts_of(shapes, dtypes), each.get_size())
            with self._lock:
                if (space := self._space(layout)) is not None:
                    self._with_objects[space] = None
                    self._of_family[layout.family] = space
            if space is not None:
                places.setdefault(space, []).append(index)
        return places

    def _space_to_ask(self, key: ObjectKey, desc: MemoryLayoutDesc | None) -> ObjectSpace | None:
        family = family_of(key)
        with self._lock:
            if (known := self._of_family.get(family)) is not None:
                return known
            if desc is None or not desc.shapes:  # `lmcache bench l2` gives an empty one
                return None
            sizes = (shape.numel() * dtype.itemsize for shape, dtype in zip(desc.shapes, desc.dtypes, strict=True))
            space = self._space(ObjectLayout(family, parts_of(desc.shapes, desc.dtypes), sum(sizes)))
            if space is not None:
                self._of_family[family] = space
            return space

    def _space(self, layout: ObjectLayout) -> ObjectSpace | None:
        """Return the space of a layout, which is opened if it is new; None if there are too many. Under the lock."""
        space = self._spaces.get(layout)
        if space is None:
            if len(self._spaces) >= MAX_SPACES or not layout.object_bytes:
                return None
            space = self._spaces[layout] = ObjectSpace(layout, self._settings, self._evicted)
            space.start()
            logger.info("kvtier: opened %s", layout)
            if len(self._spaces) == MAX_SPACES:
                logger.warning("kvtier: %d layouts are open, objects of others are not cached", MAX_SPACES)
        return space

    @staticmethod
    def _bitmap_parts(num_keys: int, num_parts: int, on_end: Callable[[Bitmap], None]) -> Parts[list[int]]:
        def end(parts: list[list[int]]) -> None:
            bitmap = Bitmap(num_keys)
            for indexes in parts:
                bitmap.batched_set(indexes)
            on_end(bitmap)

        return Parts[list[int]](num_parts, end)


def _add_places(parts: Parts[list[int]], indexes: Sequence[int]) -> Callable[[list[int]], None]:
    """Return a function that adds a space's answer, by places among its own keys, as places in the task."""
    return lambda found: parts.add([indexes[place] for place in found])
