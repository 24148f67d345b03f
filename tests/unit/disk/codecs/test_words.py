"""Every way to split and merge words makes the bytes that docs/format.md states, and the faster ones come unnoticed."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.disk.codecs import words
from kvtier.disk.codecs.planes import BLOCK_BYTES
from kvtier.disk.codecs.split import Split16Codec, Split32Codec
from kvtier.disk.codecs.words import NUMPY, WordKernels, Words, compile_kernels
from tests.unit.disk.codecs.payloads import MAKERS, encoded, payload
from tests.unit.disk.codecs.test_damage import try_decode


@pytest.fixture(scope="module")
def compiled() -> WordKernels:
    pytest.importorskip("numba")
    return compile_kernels()


@pytest.fixture(autouse=True)
def numpy_again() -> Iterator[None]:
    yield
    words.use_kernels(NUMPY)


def random_words(seed: int, length: int) -> Words:
    return np.random.default_rng(seed).integers(0, 2**16, length, dtype=np.uint16)


def planes_of(kernels: WordKernels, values: Words) -> tuple[bytes, bytes]:
    high, low, temp = (np.empty(values.size // 2, np.uint16) for _ in range(3))
    kernels.split(values, high, low, temp)
    return high.tobytes(), low.tobytes()


@given(st.integers(0, 1000), st.integers(1, 700))
def test_the_compiled_planes_are_those_of_numpy(compiled: WordKernels, seed: int, half: int) -> None:
    values = random_words(seed, 2 * half)
    values.flags.writeable = False
    assert planes_of(compiled, values) == planes_of(NUMPY, values)


@given(st.integers(0, 1000), st.integers(1, 700))
def test_the_compiled_merge_undoes_the_split(compiled: WordKernels, seed: int, half: int) -> None:
    values = random_words(seed, 2 * half)
    high, low = (np.frombuffer(plane, np.uint16) for plane in planes_of(NUMPY, values))  # not writeable
    merged = np.empty_like(values)
    compiled.merge(high, low, merged)
    assert merged.tobytes() == values.tobytes()


@pytest.mark.parametrize("codec", [Split16Codec(), Split32Codec()], ids=lambda codec: codec.name)
@pytest.mark.parametrize("kind", sorted(MAKERS))
@pytest.mark.parametrize("length", [8, 1200, 65_536, BLOCK_BYTES - 4, 2 * BLOCK_BYTES + 12])
def test_stored_bytes_do_not_depend_on_the_kernels(
    compiled: WordKernels, codec: Split16Codec | Split32Codec, kind: str, length: int
) -> None:
    data = payload(kind, length)
    stored = encoded(codec, data)
    words.use_kernels(compiled)
    assert encoded(codec, data) == stored
    for shift in range(2):  # stored bytes at an odd address, too
        out = bytearray(length)
        codec.decode(memoryview(bytes(shift) + stored)[shift:], [memoryview(out)])
        assert out == data


@pytest.mark.parametrize("codec", [Split16Codec(), Split32Codec()], ids=lambda codec: codec.name)
def test_damage_is_survived_with_compiled_kernels(compiled: WordKernels, codec: Split16Codec | Split32Codec) -> None:
    stored = bytearray(encoded(codec, payload("bf16", 1200)))
    words.use_kernels(compiled)
    for position in range(len(stored)):
        stored[position] ^= 1
        try_decode(codec, bytes(stored))
        stored[position] ^= 1


def test_other_kernels_are_made_once_they_pay_and_numpy_serves_until_they_are_ready() -> None:
    asked, ready, used = threading.Event(), threading.Event(), threading.Event()

    def split(values: Words, high: Words, low: Words, temp: Words) -> None:
        used.set()
        NUMPY.split(values, high, low, temp)

    def make() -> WordKernels:
        asked.set()
        assert ready.wait(10)
        return WordKernels(split, NUMPY.merge)

    words.replace_after(15_000, make)
    data = payload("bf16", 5000)
    stored = encoded(Split16Codec(), data)
    Split16Codec().decode(memoryview(stored), [memoryview(bytearray(5000))])
    assert not asked.is_set()
    assert encoded(Split16Codec(), data) == stored
    assert asked.wait(10)
    assert encoded(Split16Codec(), data) == stored
    assert not used.is_set()
    ready.set()
    for thread in threading.enumerate():
        if thread.name == "kvtier-compile":
            thread.join(10)
    assert encoded(Split16Codec(), data) == stored
    assert used.is_set()


def test_numpy_stays_where_nothing_can_be_made() -> None:
    words.replace_after(1, lambda: None)
    data = payload("bf16", 5000)
    assert encoded(Split16Codec(), data) == encoded(Split16Codec(), data)
