"""Tests of the CUDA worker on a real GPU: `pytest -q tests/gpu`. Skipped where there is none.

KVTIER_GPU_TESTS=fake runs them over tensors in host memory and a fake device: that proves the tests, not the worker.
"""

import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typing_extensions import override

if TYPE_CHECKING:
    import torch

    from tests.gpu.rig import Rig

IS_FAKE = os.environ.get("KVTIER_GPU_TESTS") == "fake"
MISSING = [name for name in ("torch", "vllm") if importlib.util.find_spec(name) is None]
SHM = Path("/dev/shm")


class _NotHere(pytest.Module):
    """A file of tests that cannot be imported."""

    @override
    def collect(self) -> Any:
        pytest.skip(f"{' and '.join(MISSING)} missing: install vLLM for CUDA", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip all with a reason where they would fail to be imported."""
    return _NotHere.from_parent(parent, path=module_path) if MISSING else None


@pytest.fixture
def device() -> "torch.device":
    """The GPU under test."""
    import torch

    if IS_FAKE:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no GPU; KVTIER_GPU_TESTS=fake runs the tests themselves")
    return torch.device("cuda", torch.cuda.current_device())


MakeRig = Callable[..., "Rig"]


@pytest.fixture
def make_rig(device: "torch.device") -> Iterator[MakeRig]:
    """Return a maker of rigs, whose arenas are in shared memory."""
    from tests.gpu.rig import Rig

    with tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None) as folder:
        rigs: list[Rig] = []

        def make(**options: Any) -> Rig:
            rigs.append(Rig(Path(folder) / str(len(rigs)), device, **options))
            return rigs[-1]

        yield make
        for rig in rigs:
            rig.close()
