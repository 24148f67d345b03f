"""Copies in host memory: both routines, over lists of any sizes."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier_connector.workers import batched_memcpy
from kvtier_connector.workers.batched_memcpy import HostCopies, compiled_copies, interpreted_copies

LARGE = 40_000


@pytest.fixture(scope="module", params=[compiled_copies, lambda: interpreted_copies], ids=["compiled", "interpreted"])
def copies(request: pytest.FixtureRequest) -> HostCopies:
    made: HostCopies = request.param()
    return made


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.sampled_from([0, 1, 7, 4096, LARGE]), max_size=6), st.randoms(use_true_random=False))
def test_bytes_land_where_they_belong(copies: HostCopies, sizes: list[int], random: "np.random.Generator") -> None:
    source = np.frombuffer(np.random.default_rng(len(sizes)).bytes(8 * LARGE), np.uint8)
    target, expected = np.zeros_like(source), np.zeros_like(source)
    places = list(range(len(sizes)))
    random.shuffle(places)
    for place, size in zip(places, sizes, strict=True):
        expected[place * LARGE : place * LARGE + size] = source[place * LARGE + 3 : place * LARGE + 3 + size]
    starts = np.array([place * LARGE for place in places], np.int64)
    copies(target.ctypes.data + starts, source.ctypes.data + 3 + starts, np.array(sizes, np.int64))
    assert (target == expected).all()


def test_without_numba(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It works, and says that it is slower."""

    def refuse() -> HostCopies:
        raise ImportError("no module named numba")

    monkeypatch.setattr(batched_memcpy, "compiled_copies", refuse)
    assert batched_memcpy.host_copies.__wrapped__() is interpreted_copies
    assert "no module named numba" in caplog.text
