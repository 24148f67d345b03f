"""The worker half: copies vLLM's KV blocks to and from arena rows, on the CPU platform and on CUDA."""

from typing import TYPE_CHECKING

from kvtier_connector.workers.base import KVTierWorker
from kvtier_connector.workers.copy_plan import WorkerLayout, page_places

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches

__all__ = ["KVTierWorker", "WorkerLayout", "make_worker", "page_places"]


def make_worker(layout: WorkerLayout, caches: "CanonicalKVCaches") -> KVTierWorker:
    """Return the worker for the device that the KV cache is on.

    Raises:
        ConfigError: The device's driver does not report failed copies.
    """
    device = caches.tensors[0].tensor.device
    if device.type == "cpu":
        from kvtier_connector.workers.cpu_worker import KVTierCPUWorker

        return KVTierCPUWorker(layout, caches)
    from kvtier_connector.workers.cuda.cuda_device import CudaCopies, CudaHostMemory, check_driver
    from kvtier_connector.workers.cuda.cuda_worker import KVTierCUDAWorker
    from kvtier_connector.workers.cuda.small_pages import small_pages_of

    check_driver()
    copies = CudaCopies(device, small_pages_of(layout, device))
    return KVTierCUDAWorker(layout, caches, copies, CudaHostMemory(device))
