"""`WordKernels` compiled by numba, which vLLM's environment has; elsewhere the extra `fast` brings it.

Both are one pass over the block instead of numpy's six. Importing numba takes a quarter of a second and 130 MiB,
compiling half a second. Nothing is cached on disk: that second is not worth code that somebody else could write.
"""

import importlib

import numpy as np

from kvtier.disk.codecs.words import WordKernels, Words


def compile_kernels() -> WordKernels:
    """Return compiled kernels. Takes about a second of CPU, most of it with Python's lock given back often.

    Raises:
        ImportError: There is no numba, or none for this numpy.
        Exception: One of numba's many.
    """
    numba = importlib.import_module("numba")
    read = numba.types.Array(numba.types.uint16, 1, "C", readonly=True)
    write = numba.types.Array(numba.types.uint16, 1, "C")
    # With a signature it is compiled here and not at the first call.
    kernels = WordKernels(
        split=numba.njit(numba.void(read, write, write, write), nogil=True)(_split),
        merge=numba.njit(numba.void(read, read, write), nogil=True)(_merge),
    )
    nothing = np.zeros(0, np.uint16)
    # numba's first call takes some ms more, which a request would wait for.
    kernels.split(nothing, nothing, nothing, nothing)
    kernels.merge(nothing, nothing, nothing)
    return kernels


def _split(values: Words, high: Words, low: Words, _: Words) -> None:
    half = high.size
    for i in range(half):
        first, second = values[i], values[half + i]
        high[i] = (first >> 8) | (second & 0xFF00)
        low[i] = (first & 0x00FF) | (second << 8)


def _merge(high: Words, low: Words, values: Words) -> None:
    half = high.size
    for i in range(half):
        values[i] = (high[i] << 8) | (low[i] & 0x00FF)
        values[half + i] = (high[i] & 0xFF00) | (low[i] >> 8)
