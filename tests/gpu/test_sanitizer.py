"""The copy path under NVIDIA's compute-sanitizer, where it is installed: no access outside of what is there."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.conftest import IS_FAKE

ONE_OF_EACH = "(bf16 and 2) or test_blocks_that_are_not_loaded"


@pytest.mark.timeout(600)
def test_memcheck(device: torch.device) -> None:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if IS_FAKE or sanitizer is None:
        pytest.skip("no compute-sanitizer")
    tests = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", ONE_OF_EACH]
    command = [sanitizer, "--tool", "memcheck", "--error-exitcode", "9", *tests, "tests/gpu/test_bit_identity.py"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
