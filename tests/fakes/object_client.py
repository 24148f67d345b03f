"""LMCache's side of an object space, without LMCache: buffers of its own, and waiting for answers."""

import contextlib
import ctypes
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvtier.core.layout import ChunkKey
from kvtier_lmcache.adapter_settings import AdapterSettings
from kvtier_lmcache.object_layouts import ObjectFamily, ObjectLayout
from kvtier_lmcache.object_space import ObjectSpace
from tests.fakes.scripted_engine import chunk_key

DEADLINE_S = 30.0


class ObjectClient:
    """Calls a space and waits for what it answers."""

    def __init__(self, space: ObjectSpace) -> None:
        self._space = space
        self._object_bytes = space.layout.object_bytes

    def store(self, objects: dict[ChunkKey, bytes]) -> bool:
        """Store objects; returns whether the daemon holds all of them."""
        buffers = [ctypes.create_string_buffer(data, len(data)) for data in objects.values()]
        _, is_complete = _answer(
            lambda end: self._space.store([*objects], [ctypes.addressof(buffer) for buffer in buffers], end)
        )
        return bool(is_complete)

    def lookup(self, keys: Sequence[ChunkKey]) -> list[int]:
        """Return the indexes of keys that are held."""
        (found,) = _answer(lambda end: self._space.lookup(keys, end))
        return sorted(found)

    def load(self, keys: Sequence[ChunkKey]) -> dict[int, bytes]:
        """Return the objects that could be loaded, by index."""
        buffers = [ctypes.create_string_buffer(self._object_bytes) for _ in keys]
        addresses = [ctypes.addressof(buffer) for buffer in buffers]
        (loaded,) = _answer(lambda end: self._space.load(keys, addresses, end))
        return {index: buffers[index].raw for index in loaded}


def _answer(call: Callable[[Callable[..., None]], None]) -> tuple[Any, ...]:
    answers: list[tuple[Any, ...]] = []
    done = threading.Event()

    def end(*answer: Any) -> None:
        answers.append(answer)
        done.set()

    call(end)
    assert done.wait(DEADLINE_S), "no answer"
    assert len(answers) == 1
    return answers[0]


def object_layout(object_bytes: int, model: str = "model") -> ObjectLayout:
    """A layout of one tensor."""
    return ObjectLayout(ObjectFamily(model, 1, 0), ((str(object_bytes), "torch.uint8"),), object_bytes)


@contextlib.contextmanager
def open_space(
    socket: Path,
    object_bytes: int,
    *,
    timeout_s: float = DEADLINE_S,
    on_evicted: Callable[[Sequence[ChunkKey]], None] = lambda keys: None,
) -> Iterator[ObjectSpace]:
    """Open a space at a daemon's socket, until the block ends."""
    settings = AdapterSettings(socket=socket, timeout_s=timeout_s)
    space = ObjectSpace(object_layout(object_bytes), settings, on_evicted)
    space.start()
    try:
        yield space
    finally:
        space.close()


def some_objects(num_objects: int, object_bytes: int, seed: int = 0) -> dict[ChunkKey, bytes]:
    """Objects of random bytes, each of its own."""
    chance = random.Random(seed)
    return {chunk_key((seed, number)): chance.randbytes(object_bytes) for number in range(num_objects)}
