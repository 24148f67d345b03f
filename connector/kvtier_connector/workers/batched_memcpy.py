"""Batched memcpy between vLLM's CPU cache and the arena: many copies of a job in one call without Python's lock.

One `memmove` per page from Python costs a microsecond each, and the lock: a copy that holds it makes vLLM's
own thread, which releases it at every operation, wait up to 5 ms; a copy that releases it waits as long to get it back.
"""

import ctypes
import functools
import importlib
import logging
from collections.abc import Callable

import numpy as np

from kvtier_connector.workers.copy_plan import Int64s

logger = logging.getLogger(__name__)

HostCopies = Callable[[Int64s, Int64s, Int64s], None]
"""Copies `sizes[i]` bytes from the address `sources[i]` to `destinations[i]`; called with those in this order, all
contiguous `(n,)` int64. Ranges do not overlap."""


@functools.cache
def host_copies() -> HostCopies:
    """Return the compiled routine, or without numba (vLLM's environment has it) the other. Takes 0.6 s once."""
    try:
        return compiled_copies()
    except Exception as error:  # one of numba's many
        logger.warning("kvtier: copies are not compiled and take longer: %s", error)
        return interpreted_copies


def compiled_copies() -> HostCopies:
    """Return the routine compiled by numba.

    Raises:
        ImportError: There is no numba, or none for this numpy.
        Exception: One of numba's many.
    """
    numba = importlib.import_module("numba")
    memcpy = ctypes.CDLL(None).memcpy
    memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    memcpy.restype = ctypes.c_void_p

    def copy(destinations: Int64s, sources: Int64s, sizes: Int64s) -> None:
        for index in range(sizes.size):
            memcpy(destinations[index], sources[index], sizes[index])

    column = numba.types.Array(numba.types.int64, 1, "C")
    # With a signature it is compiled here and not at the first call.
    compiled: HostCopies = numba.njit(numba.void(column, column, column), nogil=True)(copy)
    if compiled is copy:
        raise RuntimeError("NUMBA_DISABLE_JIT is set")
    nothing = np.zeros(0, np.int64)
    compiled(nothing, nothing, nothing)  # numba's first call takes 9 ms more, which a request would wait for
    return compiled


def interpreted_copies(destinations: Int64s, sources: Int64s, sizes: Int64s) -> None:
    """Do the same from Python."""
    for destination, source, size in zip(destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(destination, source, size)
