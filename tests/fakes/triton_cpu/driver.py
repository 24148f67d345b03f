"""The driver that Triton asks for."""

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class CPUDriver(DriverBase):
    """Says that there is a CPU."""

    def __init__(self) -> None:
        self.utils = None

    @staticmethod
    def is_active() -> bool:
        """See Triton."""
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        """See Triton."""
        return ty

    def get_current_target(self) -> Any:
        """See Triton."""
        return GPUTarget("cpu", 0, 0)

    def get_active_torch_device(self) -> torch.device:
        """See Triton."""
        return torch.device("cpu")

    def get_current_device(self) -> int:
        """See Triton."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """See Triton."""
        return 0

    def get_benchmarker(self) -> Any:
        """See Triton."""
        raise NotImplementedError

    def get_empty_cache_for_benchmark(self) -> Any:
        """See Triton."""
        raise NotImplementedError

    def clear_cache(self, cache: Any) -> None:
        """See Triton."""
