"""Tests of the CUDA worker on a real GPU: `pytest -q tests/gpu`. Skipped where there is none.

KVTIER_GPU_TESTS=fake runs them over tensors in host memory and a fake device: that proves the tests, not the worker.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.rig import Rig

IS_FAKE = os.environ.get("KVTIER_GPU_TESTS") == "fake"
SHM = Path("/dev/shm")


@pytest.fixture
def device() -> torch.device:
    """The GPU under test."""
    if IS_FAKE:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no GPU; KVTIER_GPU_TESTS=fake runs the tests themselves")
    return torch.device("cuda", torch.cuda.current_device())


MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig(device: torch.device) -> Iterator[MakeRig]:
    """Return a maker of rigs, whose arenas are in shared memory."""
    with tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None) as folder:
        rigs: list[Rig] = []

        def make(**options: Any) -> Rig:
            rigs.append(Rig(Path(folder) / str(len(rigs)), device, **options))
            return rigs[-1]

        yield make
        for rig in rigs:
            rig.close()
