"""What a run on a GPU needs, looked at within a second and before anything starts: all that is missing at once."""

import importlib.metadata
import importlib.util
import shutil
from collections.abc import Mapping
from pathlib import Path

MODULES: Mapping[str, str] = {
    "torch": "torch",
    "vllm": "vllm",
    "kvtier": "this repository's root on PYTHONPATH",
    "kvtier_connector": "this repository's connector/ on PYTHONPATH",
    "google.protobuf": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "httpx": "httpx",
    "platformdirs": "platformdirs",
    "prometheus_client": "prometheus-client",
    "pydantic_settings": "pydantic-settings",
    "pytest": "pytest",
    "rich": "rich",
    "typer": "typer",
    "uvicorn": "uvicorn",
    "xxhash": "xxhash",
    "zstandard": "zstandard",
}
MIN_PROTOBUF = (6, 31)
SHM = Path("/dev/shm")
_GIB = 2**30


def problems(folder: Path, *, host_bytes: int) -> list[str]:
    """Return what is missing, each with its remedy; nothing is imported.

    Args:
        folder: Where packs, models and logs go; it may not exist yet.
        host_bytes: Host memory for KV, which one system at a time has; twice as much goes to disk.
    """
    found = [f"{name} is missing: install {remedy}" for name, remedy in MODULES.items() if not _exists(name)]
    found += _old_protobuf()
    while not folder.exists():
        folder = folder.parent
    for place, needed, remedy in (
        (SHM, host_bytes, "enlarge it (mount -o remount,size=), or use shorter --lengths"),
        (folder, 2 * host_bytes, "name another folder with --folder, or use shorter --lengths"),
    ):
        free = shutil.disk_usage(place).free if place.is_dir() else 0
        if free < needed:
            found.append(f"{place} has {free / _GIB:.0f} GiB free, {needed / _GIB:.0f} are needed: {remedy}")
    memory = _available_memory()
    if memory < host_bytes:
        needed_gib = host_bytes / _GIB
        found.append(f"{memory / _GIB:.0f} GiB of memory are free, {needed_gib:.0f} are needed: use shorter --lengths")
    return found


def _available_memory() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return 1024 * int(fields["MemAvailable"].split()[0])


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # of a package above it
        return False


def _old_protobuf() -> list[str]:
    try:
        version = importlib.metadata.version("protobuf")
    except importlib.metadata.PackageNotFoundError:
        return []  # named already
    least = ".".join(map(str, MIN_PROTOBUF))
    if tuple(map(int, version.split(".")[:2])) >= MIN_PROTOBUF:
        return []
    return [f"protobuf {version} is too old for the generated code: install {least} or later"]
