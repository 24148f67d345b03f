"""Asks Linux to take pages of arena rows from the memory node (NUMA) that the GPU is attached to.

A row gets its pages from the daemon, so from the node that the daemon's thread runs on. If it is another than the
GPU's, each copy crosses the link between the processors. An arena lies in tmpfs, where a memory policy belongs to the
file: it applies to pages that any process allocates later, the daemon's fallocate included. Invariants:

- The node is preferred: where it is full, pages come from another.
- Pages that a row has stay where they are. They may be page-locked by other processes, and those cannot be moved.
- A policy is set through a second mapping, which goes at once: Linux splits a mapping for each range that has a policy
  of its own, and a process may have 65,530 of them.

Engines that share an arena and have GPUs on different nodes set it one after the other: the last one wins.

Source: Linux's numa_memory_policy ("Shared Policy"); mbind(2) and mremap(2), of a mapping of which 0 bytes are moved.
Not proven on a machine with several nodes.
"""

import ctypes
import logging
import os
import platform
from collections.abc import Callable
from pathlib import Path

import torch

from kvtier.client.arena_map import ArenaMap
from kvtier.linux import MBIND, MemoryPolicy, MremapFlag
from kvtier_connector.workers.cpu_affinity import parse_list

logger = logging.getLogger(__name__)

MAX_RANGES = 65_536
"""Rows of 2 MiB in 128 GiB. Where a rank has a part of each row, each is a range: about 320 bytes in the kernel, and 5
us of the calling thread."""
_SYSFS = Path("/sys")
_WORD_BITS = 64

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
_libc.mremap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.syscall.restype = ctypes.c_long
_MAP_FAILED = ctypes.c_void_p(-1).value


def prefer_node(address: int, num_bytes: int, node: int) -> None:
    """Have Linux prefer a node for pages that a range of a mapped tmpfs file gets from now on, in any process.

    Args:
        address: Of whole pages.
        num_bytes: Whole pages within one mapping.
        node: The memory node.

    Raises:
        OSError: The kernel refuses it; EPERM in a container without CAP_SYS_NICE.
        KeyError: An architecture that kvtier has no system call number for.
    """
    number = MBIND[platform.machine()]
    mask = (ctypes.c_ulong * (node // _WORD_BITS + 1))()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    second = _libc.mremap(address, 0, num_bytes, MremapFlag.MAYMOVE)
    if second == _MAP_FAILED:
        raise _refused()
    try:
        # One bit more than there are: the kernel looks at one less than it is given.
        arguments = (MemoryPolicy.PREFERRED, mask, ctypes.c_ulong(len(mask) * _WORD_BITS + 1), ctypes.c_ulong(0))
        if _libc.syscall(ctypes.c_long(number), ctypes.c_void_p(second), ctypes.c_ulong(num_bytes), *arguments):
            raise _refused()
    finally:
        _libc.munmap(second, num_bytes)


def place_rows(
    arena: ArenaMap,
    first: int,
    length: int,
    device: torch.device,
    *,
    sysfs: Path = _SYSFS,
    prefer: Callable[[int, int, int], None] = prefer_node,
) -> None:
    """Ask for the GPU's node for the pages that these bytes of each row get from now on.

    Does nothing where the machine has one node, or the GPU's is not known. Never raises: what lies elsewhere is copied
    all the same.

    Args:
        arena: Its rows are whole pages.
        first: Of the calling rank's pages, within a row.
        length: Of them.
        device: The GPU.
        sysfs: Where Linux lists nodes and devices.
        prefer: `prefer_node`, or a test's.
    """
    node = _node_of(device, sysfs)
    if node is None:
        return
    geometry = arena.geometry
    slots, num_bytes = range(geometry.num_slots), length
    if length == geometry.row_bytes:
        slots, num_bytes = range(1), length * geometry.num_slots
    if len(slots) > MAX_RANGES:
        logger.debug("kvtier: %d rows are too many to have each part of %s on its GPU's node", len(slots), arena.path)
        return
    try:
        for slot in slots:
            prefer(arena.row_address(slot) + first, num_bytes, node)
    except Exception as exc:
        logger.warning(
            "kvtier: rows of arena %s may lie far from %s, whose memory node is %d: mbind fails (%s). Copies may be "
            "slower, never wrong. A container needs the capability SYS_NICE for it",
            arena.path,
            device,
            node,
            exc,
        )


def _node_of(device: torch.device, sysfs: Path) -> int | None:
    """Return a GPU's memory node, where there are others and it is known."""
    try:
        # Memory without cores is a device's own (a GPU's, CXL): no choice for rows.
        memory, cores = (set(_numbers(sysfs / "devices/system/node" / name)) for name in ("has_memory", "has_cpu"))
        nodes = memory & cores
        if len(nodes) < 2:
            return None
        # Source: torch/numa/binding.py of torch 2.13.
        found = torch.cuda.get_device_properties(device)
        domain, bus, number = found.pci_domain_id, found.pci_bus_id, found.pci_device_id
        path = sysfs / "bus/pci/devices" / f"{domain:04x}:{bus:02x}:{number:02x}.0" / "numa_node"
        node = int(path.read_text())
    except Exception:  # a sandbox without sysfs, an older torch
        logger.debug("kvtier: the memory node of %s is not known", device, exc_info=True)
        return None
    return node if node in nodes else None  # -1: the firmware does not say


def _numbers(path: Path) -> list[int]:
    return list(parse_list(path.read_text()))


def _refused() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
