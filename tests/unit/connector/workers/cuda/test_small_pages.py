"""How small pages are moved, over tensors in host memory and a kernel that works as vLLM's does."""

import contextlib
import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from vllm.triton_utils import HAS_TRITON
from vllm.v1.kv_offload.cpu import swap_blocks_triton

from kvtier_connector.workers.copy_plan import CopyList, GroupPages, Int64s, WorkerLayout
from kvtier_connector.workers.cuda import small_pages
from kvtier_connector.workers.cuda.small_pages import SmallPages, small_pages_of

CPU = torch.device("cpu")
PAGE, NUM_PAGES = 4096, 40


class Kernel:
    """Does what vLLM's `_swap_blocks_kernel` does with addresses.

    Attributes:
        launches: Grid, pages and bytes a program moves at once.
        is_broken: It moves nothing.
    """

    def __init__(self) -> None:
        self.launches: list[tuple[int, int, int]] = []
        self.is_broken = False

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(
            src_addrs: torch.Tensor, dst_addrs: torch.Tensor, sizes: torch.Tensor, n_jobs: int, *, BYTES_PER_CHUNK: int
        ) -> None:
            self.launches.append((*grid, n_jobs, BYTES_PER_CHUNK))
            for column in (src_addrs, dst_addrs, sizes):
                assert column.dtype == torch.int64
                assert (column.numel(), column.stride()) == (n_jobs, (1,))
            for source, target, size in zip(src_addrs.tolist(), dst_addrs.tolist(), sizes.tolist(), strict=True):
                assert size % 8 == 0
                if size and not self.is_broken:
                    ctypes.memmove(target, source, size)

        return launch


def column(values: Any) -> Int64s:
    return np.fromiter(values, np.int64)


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture(params=["fake", "vllm"])
def any_kernel(request: pytest.FixtureRequest) -> Any:
    """The fake, and what it stands for."""
    if request.param == "fake":
        return Kernel()
    if not HAS_TRITON:
        pytest.skip("no Triton here; make test-triton has it")
    return swap_blocks_triton._swap_blocks_kernel


@pytest.mark.parametrize("is_load", [True, False])
def test_pages_go_between_the_ring_and_their_places(any_kernel: Any, is_load: bool) -> None:
    pages = SmallPages(CPU, any_kernel, PAGE, ring_bytes=64 * PAGE)
    vllm = torch.randint(0, 255, (NUM_PAGES, 2 * PAGE), dtype=torch.uint8)
    row = torch.randint(0, 255, (NUM_PAGES, PAGE), dtype=torch.uint8)
    copies = CopyList(
        vllm=column(page.data_ptr() for page in vllm),
        arena=column(page.data_ptr() for page in row),
        sizes=column([PAGE] * NUM_PAGES),
        regions=column([row.data_ptr()] * NUM_PAGES),
    )
    expected = row.clone() if is_load else vllm[:, :PAGE].clone()
    direct, (batch,) = pages.split(copies, is_load=is_load)
    assert direct.sizes.size == 0
    (ring,), (in_row,), (num_bytes,) = batch.spans.vllm.tolist(), batch.spans.arena.tolist(), batch.spans.sizes.tolist()
    if is_load:
        ctypes.memmove(ring, in_row, num_bytes)
        pages.move(batch.pages, is_load=True)
        assert torch.equal(vllm[:, :PAGE], expected)
    else:
        pages.move(batch.pages, is_load=False)
        ctypes.memmove(in_row, ring, num_bytes)
        assert torch.equal(row, expected)


def test_each_direction_has_a_ring(kernel: Kernel) -> None:
    """Both are under way at once, in streams that do not wait for each other."""
    pages = SmallPages(CPU, kernel, PAGE, ring_bytes=64 * PAGE)
    places = column(range(2**40, 2**40 + NUM_PAGES * PAGE, PAGE))
    copies = CopyList(places + 2**41, places, column([PAGE] * NUM_PAGES), np.full(NUM_PAGES, 2**40))
    rings = [pages.split(copies, is_load=is_load)[1][0].spans.vllm[0] for is_load in (True, False)]
    assert abs(rings[0] - rings[1]) >= 64 * PAGE


def test_every_launch_is_of_the_kind_that_was_compiled_at_the_start(kernel: Kernel) -> None:
    """Triton compiles again for a count that is no multiple of 16: a request waited for it."""
    pages = SmallPages(CPU, kernel, 3000, ring_bytes=64 * PAGE)
    assert kernel.launches == [(16, 16, 4096)]
    nothing = column([0] * 201)
    pages.move(CopyList(nothing, nothing, nothing, nothing), is_load=True)
    assert kernel.launches[1:] == [(128, 208, 4096)]
    SmallPages(CPU, kernel, 24 * 1024, ring_bytes=64 * PAGE)
    assert kernel.launches[2:] == [(16, 16, 8192)]


def layout(*page_bytes: int) -> WorkerLayout:
    sizes = column(page_bytes).reshape(-1, 1)
    group = GroupPages(base_addresses=sizes, block_strides=sizes, page_bytes=sizes, region_offsets=sizes)
    return WorkerLayout(0, 2**20, 1, {0: 0}, [group])


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    monkeypatch.setattr(small_pages, "vllm_kernel", lambda: kernel)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)


@pytest.mark.usefixtures("on_cpu")
def test_a_layout_without_small_pages_takes_no_memory(kernel: Kernel, caplog: pytest.LogCaptureFixture) -> None:
    assert small_pages_of(layout(2**21), CPU) is None
    assert small_pages_of(layout(8196), CPU) is None
    assert kernel.launches == []
    assert caplog.text == ""
    assert small_pages_of(layout(2**21, 8192, 1024), CPU) is not None
    assert kernel.launches == [(16, 16, 8192)]


@pytest.mark.usefixtures("on_cpu")
def test_without_memory_for_rings_pages_are_copied_one_by_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", full)
    assert small_pages_of(layout(8192), CPU) is None
    assert "pages of 8192 bytes are copied one by one, which is slow, never wrong (CUDA out of memory)" in caplog.text


@pytest.mark.usefixtures("on_cpu")
def test_a_kernel_that_does_not_work_is_not_used(kernel: Kernel, caplog: pytest.LogCaptureFixture) -> None:
    kernel.is_broken = True
    assert small_pages_of(layout(8192), CPU) is None
    assert "kernel does not copy what it is given" in caplog.text


def test_where_vllm_has_no_kernel_for_this_machine_pages_are_copied_one_by_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As here: no Triton."""
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    assert small_pages_of(layout(8192), CPU) is None
    assert "no Triton for CUDA here" in caplog.text
