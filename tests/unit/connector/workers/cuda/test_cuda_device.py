"""The order of calls that the CUDA worker's copies rest on, over a runtime that writes them down."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvtier.errors import ConfigError
from kvtier_connector.workers.copy_plan import CopyList
from kvtier_connector.workers.cuda import cuda_device
from kvtier_connector.workers.cuda.cuda_device import CudaCopies, CudaHostMemory
from kvtier_connector.workers.cuda.page_locked_arena import PageLockError
from kvtier_connector.workers.cuda.page_ring import RingBatch
from kvtier_connector.workers.cuda.small_pages import SmallPages

DEVICE = torch.device("cuda", 1)
COPIES = CopyList(np.array([10, 20]), np.array([30, 40]), np.array([5, 6]), np.array([30, 30]))
EMPTY = CopyList(*np.zeros((4, 0), np.int64))


class Runtime:
    """Writes down what it is asked for.

    Attributes:
        calls: In order.
        code: What the page lock calls answer.
        is_over: Whether the device has done what it was given.
        failure: What the copy raises.
        attribute: Whether locked memory is reached by host addresses, or None if the runtime does not say.
    """

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.code = 0
        self.is_over = True
        self.failure: Exception | None = None
        self.attribute: int | None = 1
        self._num_streams = 0

    def stream(self) -> "FakeStream":
        self._num_streams += 1
        return FakeStream(self, "ab"[self._num_streams - 1])

    def swap(self, source: Any, target: Any, sizes: Any, *, is_src_access_order_any: bool) -> None:
        self.calls.append(("copy", source.tolist(), target.tolist(), sizes.tolist(), is_src_access_order_any))
        if self.failure is not None:
            raise self.failure

    @contextlib.contextmanager
    def using(self, stream: "FakeStream") -> Iterator[None]:
        self.calls.append(("use", stream.name))
        yield

    def cudaHostRegister(self, *arguments: int) -> int:
        self.calls.append(("register", *arguments))
        return self.code

    def cudaHostUnregister(self, *arguments: int) -> int:
        self.calls.append(("unregister", *arguments))
        return self.code

    def cudaGetLastError(self) -> int:
        self.calls.append("last error taken")
        return self.code

    def cudaDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        assert (attribute, device) == (91, DEVICE.index)
        if self.attribute is None:
            return 1
        value._obj.value = self.attribute
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return {2: "out of memory"}[code]


class FakeSmallPages(SmallPages):
    """Has one batch for each span; writes down the kernel's launches."""

    def __init__(self, runtime: Runtime, num_batches: int) -> None:
        self.runtime, self.num_batches = runtime, num_batches

    def split(self, copies: CopyList, *, is_load: bool) -> tuple[CopyList, list[RingBatch]]:
        ring = np.array([100 if is_load else 200])
        pages = copies._replace(arena=np.array([ring[0], ring[0] + 8]))
        spans = CopyList(ring, copies.arena[:1], np.array([16]), copies.regions[:1])
        return EMPTY, [RingBatch(spans, pages)] * self.num_batches

    def move(self, pages: CopyList, *, is_load: bool) -> None:
        self.runtime.calls.append(("kernel", pages.vllm.tolist(), pages.arena.tolist(), is_load))


class FakeStream:
    def __init__(self, runtime: Runtime, name: str) -> None:
        self.runtime, self.name = runtime, name

    def wait_stream(self, other: "ModelStream") -> None:
        self.runtime.calls.append((self.name, "waits for", other.name))

    def wait_event(self, event: str) -> None:
        self.runtime.calls.append((self.name, "waits for", event))

    def synchronize(self) -> None:
        self.runtime.calls.append((self.name, "drained"))


class ModelStream:
    def __init__(self, device: torch.device) -> None:
        self.name = f"the model's on {device}"

    def record_event(self) -> str:
        return f"what {self.name} had"


class FakeEvent:
    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: FakeStream) -> None:
        stream.runtime.calls.append(("event", stream.name))
        self.stream = stream

        self.name = self.stream.name + str(len(stream.runtime.calls))

    def query(self) -> bool:
        return self.stream.runtime.is_over

    def synchronize(self) -> None:
        self.stream.runtime.calls.append(("wait for", self.name))

    def elapsed_time(self, other: "FakeEvent") -> float:
        return 250.0 * (int(other.name[1:]) - int(self.name[1:]))


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: runtime.stream())
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", runtime.using)
    monkeypatch.setattr(torch.cuda, "current_stream", ModelStream)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: runtime.calls.append(("device", device)))
    monkeypatch.setattr(cuda_device, "swap_blocks_batch", runtime.swap)
    monkeypatch.setattr(cuda_device, "CudaRTLibrary", lambda: SimpleNamespace(lib=runtime))
    return runtime


def test_a_store_waits_for_the_model_and_reads_in_stream_order(runtime: Runtime) -> None:
    ticket = CudaCopies(DEVICE).begin(COPIES, is_load=False)
    assert runtime.calls == [
        ("a", "waits for", "the model's on cuda:1"),
        ("use", "a"),
        ("event", "a"),
        ("copy", [10, 20], [30, 40], [5, 6], False),
        ("event", "a"),
    ]
    assert ticket.is_done() is True
    assert ticket.seconds() == 0.5, "from the first event to the second"
    ticket.wait()
    assert runtime.calls[-1] == ("wait for", "a5")
    runtime.is_over = False
    assert ticket.is_done() is False


def test_a_load_has_its_own_stream_and_may_read_early(runtime: Runtime) -> None:
    CudaCopies(DEVICE).begin(COPIES, is_load=True)
    assert runtime.calls[0] == ("b", "waits for", "the model's on cuda:1")
    assert runtime.calls[3] == ("copy", [30, 40], [10, 20], [5, 6], True)


def test_loads_do_not_wait_for_what_the_model_is_given_after_the_mark(runtime: Runtime) -> None:
    """Model Runner V2 submits a step's loads after its model: they began when that was over."""
    copies = CudaCopies(DEVICE)
    copies.mark()
    copies.begin(COPIES, is_load=True)
    assert runtime.calls[0] == ("b", "waits for", "what the model's on cuda:1 had")
    runtime.calls.clear()
    copies.begin(COPIES, is_load=False)
    assert runtime.calls[0] == ("a", "waits for", "the model's on cuda:1"), "which writes what is stored"
    copies.clear_mark()
    runtime.calls.clear()
    copies.begin(COPIES, is_load=True)
    assert runtime.calls[0] == ("b", "waits for", "the model's on cuda:1")


def test_a_refused_copy_leaves_nothing_under_way(runtime: Runtime) -> None:
    runtime.failure = RuntimeError("CUDA error")
    with pytest.raises(RuntimeError, match="CUDA error"):
        CudaCopies(DEVICE).begin(COPIES, is_load=False)
    assert runtime.calls[-1] == ("a", "drained")


def test_no_copies_are_no_call(runtime: Runtime) -> None:
    CudaCopies(DEVICE).begin(EMPTY, is_load=False)
    assert not any(call[0] == "copy" for call in runtime.calls if isinstance(call, tuple))


def test_small_pages_of_a_load_go_over_the_link_into_the_ring_and_then_to_their_places(runtime: Runtime) -> None:
    ticket = CudaCopies(DEVICE, FakeSmallPages(runtime, num_batches=2)).begin(COPIES, is_load=True)
    span = ("copy", [30], [100], [16], True)
    pages = ("kernel", [10, 20], [100, 108], True)
    assert runtime.calls[1:] == [("use", "b"), ("event", "b"), span, pages, span, pages, ("event", "b")]
    assert ticket.is_done()


def test_small_pages_of_a_store_are_gathered_before_they_go_over_the_link(runtime: Runtime) -> None:
    CudaCopies(DEVICE, FakeSmallPages(runtime, num_batches=2)).begin(COPIES, is_load=False)
    span = ("copy", [200], [30], [16], False)  # in order: the kernel writes the ring until then
    pages = ("kernel", [10, 20], [200, 208], False)
    assert runtime.calls == [
        ("a", "waits for", "the model's on cuda:1"),
        ("use", "a"),
        ("event", "a"),
        *[pages, span] * 2,
        ("event", "a"),
    ]


def test_a_batch_that_the_driver_refuses_leaves_nothing_under_way(runtime: Runtime) -> None:
    runtime.failure = RuntimeError("CUDA error")
    with pytest.raises(RuntimeError, match="CUDA error"):
        CudaCopies(DEVICE, FakeSmallPages(runtime, num_batches=2)).begin(COPIES, is_load=True)
    assert runtime.calls[-1] == ("b", "drained")
    assert [call[0] for call in runtime.calls if isinstance(call, tuple)].count("copy") == 1


def test_page_locks_are_the_runtimes(runtime: Runtime) -> None:
    memory = CudaHostMemory(DEVICE)
    memory.enter_thread()
    memory.lock(4096, 8192)
    memory.unlock(4096)
    assert runtime.calls == [("device", DEVICE), ("register", 4096, 8192, 0), ("unregister", 4096)]


@pytest.mark.parametrize(
    ("cuda", "attribute", "is_refused"),
    [
        pytest.param("13.0", 1, False, id="at host addresses"),
        pytest.param("13.0", 0, True, id="at others"),
        pytest.param("13.0", None, True, id="not known"),
        pytest.param(None, 0, False, id="ROCm makes no batches"),
    ],
)
def test_nothing_is_locked_for_a_device_that_reaches_it_at_other_addresses(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, cuda: str | None, attribute: int | None, is_refused: bool
) -> None:
    """A batch of copies has host addresses: there an illegal access (SGLang #40232)."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    runtime.attribute = attribute
    with pytest.raises(PageLockError, match="as on WSL2") if is_refused else contextlib.nullcontext():
        CudaHostMemory(DEVICE).enter_thread()


def test_a_refused_page_lock_says_what_the_driver_says(runtime: Runtime) -> None:
    runtime.code = 2
    with pytest.raises(PageLockError, match="cudaHostRegister fails with 2: out of memory"):
        CudaHostMemory(DEVICE).lock(0, 4096)
    with pytest.raises(PageLockError, match="cudaHostUnregister fails with 2: out of memory"):
        CudaHostMemory(DEVICE).unlock(0)


def test_the_error_of_a_page_lock_does_not_stay_for_the_models_next_launch(runtime: Runtime) -> None:
    """torch raised it there: a row that could not be unlocked ended the engine."""
    CudaHostMemory(DEVICE).lock(0, 4096)
    assert "last error taken" not in runtime.calls
    runtime.code = 2
    with pytest.raises(PageLockError):
        CudaHostMemory(DEVICE).unlock(0)
    assert runtime.calls[-1] == "last error taken"


def test_a_runtime_that_is_not_found_changes_nothing_of_the_report(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_found() -> None:
        raise AssertionError("libcudart is not loaded in the current process")

    monkeypatch.setattr(cuda_device, "CudaRTLibrary", not_found)
    runtime.code = 2
    with pytest.raises(PageLockError, match="cudaHostRegister fails with 2: out of memory"):
        CudaHostMemory(DEVICE).lock(0, 4096)


@pytest.mark.parametrize(
    ("cuda", "driver", "refused"),
    [("12.9", 12_040, "CUDA 12.4"), ("13.0", 12_079, "CUDA 12.7"), ("12.9", 12_080, ""), ("13.0", 13_000, ""),
     ("12.6", 13_000, "12.6"), (None, 60_443_483, "")],
)  # fmt: skip
def test_a_driver_whose_copies_do_not_report_failures_is_refused(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, driver: int, refused: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: driver, raising=False)
    if refused:
        with pytest.raises(ConfigError, match=f"{refused}.*(driver 570|12.8) or later"):
            cuda_device.check_driver()
    else:
        cuda_device.check_driver()
