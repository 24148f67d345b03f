"""CPU affinity of the thread that copies."""

import logging
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

_NODES = Path("/sys/devices/system/node")


def use_all_cores_of_node() -> None:
    """Let the calling thread run on all cores that vLLM's engine may use, of the NUMA nodes that it is bound to now.

    vLLM binds each compute thread of a CPU worker to one core, and what the first of them starts inherits that core:
    copies took turns with the very thread that all others wait for, even where `VLLM_CPU_NUM_OF_RESERVED_CPU` keeps
    cores free for work like this. Only in a process that vLLM made for a worker, a daemonic child of its engine's:
    in any other it was the operator who bound it. Never raises: copies can go on where they are.
    Source: `OMPProcessManager` and `WorkerProc.make_worker_process` of vLLM 0.32.
    """
    engine = multiprocessing.parent_process()
    if engine is None or engine.pid is None or not multiprocessing.current_process().daemon:
        return
    try:
        own = os.sched_getaffinity(0)
        os.sched_setaffinity(0, own | (os.sched_getaffinity(engine.pid) & _same_nodes(own)))
    except Exception:  # the engine is ending, a sandbox forbids it, a kernel lists nodes otherwise
        logger.debug("kvtier: copies stay on the cores that they were given", exc_info=True)


def _same_nodes(cores: set[int]) -> set[int]:
    """Return the cores of every node that has any of these; on a system without nodes all there can be."""
    nodes = [set(parse_list(path.read_text())) for path in _NODES.glob("node*/cpulist")]
    if not nodes:
        return set(range(os.cpu_count() or 1))
    return {core for node in nodes if not node.isdisjoint(cores) for core in node}


def parse_list(cpulist: str) -> Iterator[int]:
    """Yield cores, or nodes, of the kernel's list format, `0-3,8`. Source: cpu-lists in Linux's kernel-parameters."""
    for part in filter(None, cpulist.strip().split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
