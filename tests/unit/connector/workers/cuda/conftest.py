"""What the tests of page locks share."""

from collections.abc import Iterator

import pytest

from tests.fakes.cuda_device import FakeHostMemory


@pytest.fixture
def memory() -> Iterator[FakeHostMemory]:
    memory = FakeHostMemory()
    yield memory
    assert memory.misuse == []
