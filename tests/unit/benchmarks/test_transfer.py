"""The copy benchmark: what takes turns, and what each step is compared with."""

import pytest
import torch

from benchmarks import transfer
from benchmarks.gpu.__main__ import COPY_SHAPES
from kvtier_connector.workers.cuda.page_ring import SMALL_PAGE_BYTES


def test_on_a_cpu_each_step_is_compared_with_memcpy(capsys: pytest.CaptureFixture[str]) -> None:
    transfer.measure(torch.device("cpu"), num_layers=2, page_kib=4, num_chunks=3, num_runs=2)
    first, *lines = capsys.readouterr().out.strip().splitlines()
    assert "3 chunks x 2 layers x 4 KiB" in first
    assert [line.split()[0] for line in lines] == ["memcpy", "store", "load"]
    assert all("ratio to memcpy" in line for line in lines)


def test_on_a_gpu_both_ways_of_small_pages_are_compared_with_one_copy_in_their_direction(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ["copy out", "copy in", "store", "load", "store, one by one", "load, one by one"]
    transfer._print_rates({name: [1.0, 2.0] for name in names})
    limits = [line.split("ratio to ")[1][:8].strip() for line in capsys.readouterr().out.splitlines()]
    assert limits == ["copy out", "copy in", "copy out", "copy in", "copy out", "copy in"]


def test_a_run_on_a_gpu_measures_pages_on_both_sides_of_the_threshold() -> None:
    kib = [int(shape.split("x")[1]) for shape in COPY_SHAPES.split(",")]
    assert kib == [2048, 64, 32, 16, 8]
    assert [each for each in kib if each * 1024 < SMALL_PAGE_BYTES] == [16, 8]
