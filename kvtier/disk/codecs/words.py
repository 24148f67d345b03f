"""Splitting 16-bit words into planes of bytes, and merging them: with numpy, or compiled by numba.

The values are halved, v[i] and v[i + h] share a word of each plane: so both are six operations on whole words, which
numpy vectorizes; taking every other byte runs at a third of that speed.

    high plane, word i: high byte of v[i], then high byte of v[i + h]
    low plane, word i: low byte of v[i], then low byte of v[i + h]
"""

import importlib
import math
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class WordKernels:
    """One way to do both; all ways make the same bytes. Any thread.

    Attributes:
        split: Fills planes: values, high, low, and words to scribble in; all but the values have half their length.
        merge: Undoes it: high, low, values. May change `high`.
    """

    split: Callable[[Words, Words, Words, Words], None]
    merge: Callable[[Words, Words, Words], None]


def _split(values: Words, high: Words, low: Words, temp: Words) -> None:
    first, second = values[: high.size], values[high.size :]
    np.right_shift(first, 8, out=high)
    np.bitwise_and(second, 0xFF00, out=temp)
    np.bitwise_or(high, temp, out=high)
    np.bitwise_and(first, 0x00FF, out=low)
    np.left_shift(second, 8, out=temp)
    np.bitwise_or(low, temp, out=low)


def _merge(high: Words, low: Words, values: Words) -> None:
    """Overwrites `high`: another buffer would not stay in the cache beside these."""
    first, second = values[: high.size], values[high.size :]
    np.bitwise_and(high, 0xFF00, out=second)
    np.left_shift(high, 8, out=high)
    np.bitwise_and(low, 0x00FF, out=first)
    np.bitwise_or(first, high, out=first)
    np.right_shift(low, 8, out=high)
    np.bitwise_or(second, high, out=second)


NUMPY = WordKernels(_split, _merge)
kernels = NUMPY
"""What the codecs use, in the whole process."""

_left_bytes = math.inf
_makers: list[Callable[[], WordKernels | None]] = []


def use_kernels(chosen: WordKernels) -> None:
    """Split and merge that way from now on; calls that have begun end as they began. Cancels `replace_after`."""
    global kernels
    kernels = chosen
    _makers.clear()


def replace_after(coded_bytes: int, make: Callable[[], WordKernels | None]) -> None:
    """Have a thread make other kernels once that much was coded, so that a process that codes little does not pay.

    Args:
        coded_bytes: Payload bytes.
        make: Returns the kernels, None when there are none; must not raise.
    """
    global _left_bytes
    _left_bytes, _makers[:] = coded_bytes, [make]


def count_coded(num_bytes: int) -> None:
    """Count a payload that will be encoded or decoded."""
    global _left_bytes
    _left_bytes -= num_bytes  # threads may miss each other's counts: it comes a little later
    if _left_bytes <= 0 and _makers:
        # IndexError: another thread was first. RuntimeError: the system gives no thread, and numpy goes on.
        with suppress(IndexError, RuntimeError):
            make = _makers.pop()
            threading.Thread(target=lambda: use_kernels(make() or NUMPY), name="kvtier-compile").start()


def compile_kernels() -> WordKernels:
    """Return kernels compiled by numba: one pass over the block instead of numpy's six.

    vLLM's environment has numba; elsewhere the extra `fast` brings it. Importing it takes a quarter of a second and 130
    MiB, compiling half a second, most of it with Python's lock released often. Nothing is cached on disk: one second
    per start costs less than the risk of running code from a file that another user could write.

    Raises:
        ImportError: There is no numba, or none for this numpy.
        Exception: One of numba's many.
    """
    numba = importlib.import_module("numba")
    read = numba.types.Array(numba.types.uint16, 1, "C", readonly=True)
    write = numba.types.Array(numba.types.uint16, 1, "C")
    # With a signature it is compiled here and not at the first call.
    compiled = WordKernels(
        split=numba.njit(numba.void(read, write, write, write), nogil=True)(_split_in_one_pass),
        merge=numba.njit(numba.void(read, read, write), nogil=True)(_merge_in_one_pass),
    )
    nothing = np.zeros(0, np.uint16)
    # numba's first call takes some ms more, which a request would wait for.
    compiled.split(nothing, nothing, nothing, nothing)
    compiled.merge(nothing, nothing, nothing)
    return compiled


def _split_in_one_pass(values: Words, high: Words, low: Words, _: Words) -> None:
    half = high.size
    for i in range(half):
        first, second = values[i], values[half + i]
        high[i] = (first >> 8) | (second & 0xFF00)
        low[i] = (first & 0x00FF) | (second << 8)


def _merge_in_one_pass(high: Words, low: Words, values: Words) -> None:
    half = high.size
    for i in range(half):
        values[i] = (high[i] << 8) | (low[i] & 0x00FF)
        values[half + i] = (high[i] & 0xFF00) | (low[i] >> 8)
