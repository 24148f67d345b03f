"""The copy path under NVIDIA's compute-sanitizer, where it is installed: no access outside of what is there."""

import shutil
import subprocess

import pytest
import torch

from benchmarks.gpu import budgeted
from tests.gpu.conftest import IS_FAKE

ONE_OF_EACH = "(bf16 and 2) or test_blocks_that_are_not_loaded"
FOUND_ERRORS = 9
"""What the sanitizer ends with then, and pytest never."""


@pytest.mark.timeout(600)
def test_memcheck(device: torch.device) -> None:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if IS_FAKE or sanitizer is None:
        pytest.skip("no compute-sanitizer")
    tests = budgeted.pytest("-x", "-p", "no:cacheprovider", "-k", ONE_OF_EACH, "tests/gpu/test_bit_identity.py")
    command = [sanitizer, "--tool", "memcheck", "--error-exitcode", str(FOUND_ERRORS), *tests]
    done = subprocess.run(command, cwd=budgeted.ROOT, capture_output=True, text=True, timeout=540, check=False)
    said = done.stdout[-4000:] + done.stderr[-2000:]
    assert done.returncode != FOUND_ERRORS, f"the sanitizer found errors:\n{said}"
    assert done.returncode == 0, f"the tests ended with {done.returncode}, which says nothing about memory:\n{said}"
