"""The device behind the CUDA worker: vLLM's batched copy on streams of our own, and the runtime's page locks.

Source: `SingleDirectionOffloadingHandler` and `pin_mmap_region` of vLLM 0.32 (v1/kv_offload/cpu/gpu_worker.py): which
streams wait for which, and what source order is safe. Not proven on a GPU yet.
"""

import contextlib
import ctypes
from typing import Any

import torch
from vllm._custom_ops import swap_blocks_batch
from vllm.distributed.device_communicators.cuda_wrapper import CudaRTLibrary

from kvtier.client.arena_map import ArenaMap
from kvtier.errors import ConfigError
from kvtier_connector.workers.copy_plan import CopyList
from kvtier_connector.workers.cuda import numa_policy
from kvtier_connector.workers.cuda.page_locked_arena import PageLockError
from kvtier_connector.workers.cuda.page_ring import RingBatch
from kvtier_connector.workers.cuda.small_pages import SmallPages

MIN_DRIVER = 12_080
"""CUDA 12.8. Below it `swap_blocks_batch` makes one copy after the other, and looks at none of their results: a copy
that failed would count as a chunk."""

_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91
"""Source: cudaDeviceAttr in driver_types.h of CUDA 12.8."""


def check_driver() -> None:
    """Refuse a driver, or a build, with which a failed copy is not reported.

    Raises:
        ConfigError: It is too old.
    """
    if torch.version.cuda is None:  # ROCm counts its versions in another way
        return
    # vLLM is compiled with torch's toolkit, which says what it is compiled for.
    major, minor = (int(part) for part in torch.version.cuda.split(".")[:2])
    if 1000 * major + 10 * minor < MIN_DRIVER:
        raise ConfigError(
            "CUDA toolkit of torch and vLLM",
            torch.version.cuda,
            "this environment",
            "built with less than CUDA 12.8 vLLM's copies do not report failures; install wheels for 12.8 or later, or "
            "run vLLM without kvtier",
        )
    found = int(torch._C._cuda_getDriverVersion())
    if found < MIN_DRIVER:
        raise ConfigError(
            "NVIDIA driver",
            f"CUDA {found // 1000}.{found % 1000 // 10}",
            "this machine",
            "with less than CUDA 12.8 vLLM's copies do not report failures; install driver 570 or later, or run vLLM "
            "without kvtier",
        )


class CudaTicket:
    """Two events around a job's copies."""

    def __init__(self, began: Any, ended: Any, keepalive: object) -> None:
        self._began, self._ended = began, ended
        self._keepalive = keepalive

    def is_done(self) -> bool:
        """See `Ticket`."""
        return bool(self._ended.query())

    def wait(self) -> None:
        """See `Ticket`."""
        self._ended.synchronize()

    def seconds(self) -> float:
        """See `Ticket`."""
        return float(self._began.elapsed_time(self._ended)) / 1000


class CudaCopies:
    """One stream per direction.

    Both wait for the stream that the model runs on: a store for the KV that it writes, a load for its last use (and
    zeroing) of the blocks, which is over before the step's model where `mark` was called. Host memory is read and
    written by the copy engines only: a kernel that touches a row that is not page-locked would end the engine.

    Args:
        device: The GPU.
        small_pages: Moves small pages, which are else copied one by one.
    """

    def __init__(self, device: torch.device, small_pages: SmallPages | None = None) -> None:
        self._device, self._small_pages = device, small_pages
        self._stores, self._loads = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._marked: Any = None  # what loads wait for

    def mark(self) -> None:
        """See `Copies`."""
        self._marked = torch.cuda.current_stream(self._device).record_event()

    def clear_mark(self) -> None:
        """See `Copies`."""
        self._marked = None

    def begin(self, copies: CopyList, *, is_load: bool) -> CudaTicket:
        """See `Copies`."""
        stream = self._loads if is_load else self._stores
        batches: list[RingBatch] = []
        if self._small_pages is not None:
            copies, batches = self._small_pages.split(copies, is_load=is_load)
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if is_load and self._marked is not None:
            stream.wait_event(self._marked)
        else:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(stream):
                began.record(stream)
                keepalive = [_copy(copies, is_load=is_load)]
                keepalive += [self._move(batch, is_load=is_load) for batch in batches]
                ended.record(stream)
        except Exception:
            stream.synchronize()  # some of the copies may be under way
            raise
        return CudaTicket(began, ended, keepalive)

    def _move(self, batch: RingBatch, *, is_load: bool) -> object:
        """Move a batch through its ring in the current stream; return what the driver may still read."""
        assert self._small_pages is not None
        if not is_load:
            self._small_pages.move(batch.pages, is_load=False)
        keepalive = _copy(batch.spans, is_load=is_load)
        if is_load:
            self._small_pages.move(batch.pages, is_load=True)
        return keepalive


class CudaHostMemory:
    """cudaHostRegister of torch's runtime.

    The runtime keeps the last error per thread, and torch raises it at the next launch there. So an error is taken back
    once it is reported, whichever thread calls.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def enter_thread(self) -> None:
        """See `HostMemory`: else the thread would make a context on the first device.

        Raises:
            PageLockError: The device reaches locked memory at addresses of its own only (WSL2). A batch of copies is
                given the CPU's, and there it would be an illegal access, which ends the engine (SGLang #40232).
        """
        torch.cuda.set_device(self._device)
        if torch.version.cuda is not None and not _reaches_by_host_address(self._device):
            raise PageLockError("the device does not use host addresses of page-locked memory, as on WSL2")

    def place_rows(self, arena: ArenaMap, first: int, length: int) -> None:
        """See `HostMemory`."""
        numa_policy.place_rows(arena, first, length, self._device)

    def lock(self, address: int, num_bytes: int) -> None:
        """See `HostMemory`."""
        _check("cudaHostRegister", torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))

    def unlock(self, address: int) -> None:
        """See `HostMemory`."""
        _check("cudaHostUnregister", torch.cuda.cudart().cudaHostUnregister(address))


def _copy(copies: CopyList, *, is_load: bool) -> object:
    """Have the current stream copy; return what the driver may still read."""
    source, target = (copies.arena, copies.vllm) if is_load else (copies.vllm, copies.arena)
    arguments = [torch.from_numpy(column) for column in (source, target, copies.sizes)]
    if copies.sizes.size:
        # No one writes a row that a load reads, so its bytes may be fetched before the stream's turn; they are written
        # in its turn, so behind the kernel that still reads a ring. What a store reads (KV, or a ring) is being written
        # until then.
        swap_blocks_batch(*arguments, is_src_access_order_any=is_load)
    return arguments


def _reaches_by_host_address(device: torch.device) -> bool:
    """Return what the runtime says; False if it does not, since a copy that cannot reach its memory is fatal."""
    value = ctypes.c_int()
    attribute = _CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
    code = CudaRTLibrary().lib.cudaDeviceGetAttribute(ctypes.byref(value), attribute, device.index)
    return code == 0 and value.value == 1


def _check(call: str, code: Any) -> None:
    if int(code) != 0:
        with contextlib.suppress(Exception):  # a runtime that vLLM does not find
            CudaRTLibrary().lib.cudaGetLastError()
        raise PageLockError(f"{call} fails with {int(code)}: {torch.cuda.cudart().cudaGetErrorString(code)}")
