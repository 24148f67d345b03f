"""vLLM without kvtier: alone, with a connector that does nothing, and with its own offloading to memory and files."""

import os
from pathlib import Path

from benchmarks.harness.engine import EngineOptions
from benchmarks.systems.system import HOST_GIB, SHM, System, path_with_benchmarks


class VLLMAlone(System):
    """vLLM without any connector: the frame, cold and with its prefix cache."""

    name = "vLLM alone"
    keeps = False

    def _engine_options(self) -> EngineOptions:
        return self.options

    def forget_host_memory(self) -> None:
        """Nothing outlives vLLM."""


class VLLMAllFits(VLLMAlone):
    """vLLM without any connector, with a pool that is large enough for everything that is asked."""

    name = "vLLM alone, all fits"


class VLLMBare(VLLMAlone):
    """vLLM with a connector that does nothing."""

    name = "with a connector that does nothing"

    def _engine_options(self) -> EngineOptions:
        config: dict[str, object] = {
            "kv_connector": "BareConnector",
            "kv_connector_module_path": "benchmarks.systems.bare_connector",
            "kv_role": "kv_both",
        }
        return self._with_connector(config, {"PYTHONPATH": path_with_benchmarks()})


class VLLMTiering(System):
    """vLLM's OffloadingConnector with its host and fs tiers."""

    name = "vLLM fs tier"

    def __init__(self, home: Path, options: EngineOptions, host_gib: int = HOST_GIB) -> None:
        """Prepare; nothing runs yet."""
        super().__init__(home, options, host_gib)
        self.engine_id = f"kvtier_benchmark_{os.getpid()}"

    def _engine_options(self) -> EngineOptions:
        config: dict[str, object] = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "engine_id": self.engine_id,
            "kv_connector_extra_config": {
                "spec_name": "CPUTieringSpec",
                "spec_module_path": "benchmarks.systems.tiering_cpu",
                "cpu_bytes_to_use": self.host_gib * 2**30,
                "secondary_tiers": [{"type": "fs", "root_dir": str(self.disk_dir)}],
            },
        }
        return self._with_connector(config, {"PYTHONPATH": path_with_benchmarks()})

    def forget_host_memory(self) -> None:
        """Remove its shared memory, which a killed vLLM leaves behind."""
        for path in SHM.glob(f"vllm_offload_{self.engine_id}*"):
            path.unlink(missing_ok=True)
