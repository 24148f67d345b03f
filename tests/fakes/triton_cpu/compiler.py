"""The compiler that Triton asks for."""

from typing import Any

from triton.backends.compiler import BaseBackend


class CPUBackend(BaseBackend):
    """Is there, and is never used."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        """See Triton."""
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        """See Triton."""
        return "cpu"

    def parse_options(self, options: dict[str, Any]) -> object:
        """See Triton."""
        return options

    def add_stages(self, stages: dict[str, Any], options: object, language: Any = None) -> None:
        """Refuse: kernels are interpreted."""
        raise NotImplementedError("set TRITON_INTERPRET=1")

    def load_dialects(self, context: Any) -> None:
        """See Triton."""

    def get_module_map(self) -> dict[str, Any]:
        """See Triton."""
        return {}
