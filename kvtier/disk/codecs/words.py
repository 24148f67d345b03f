"""Splitting 16-bit words into planes of bytes, and merging them: with numpy, or with something faster once it is ready.

The values are halved, v[i] and v[i + h] share a word of each plane: so both are six operations on whole words, which
numpy vectorizes; taking every other byte runs at a third of that speed.

    high plane, word i: high byte of v[i], then high byte of v[i + h]
    low plane, word i: low byte of v[i], then low byte of v[i + h]
"""

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
_kernels = NUMPY


def split_words(values: Words, high: Words, low: Words, temp: Words) -> None:
    """See `WordKernels.split`."""
    _kernels.split(values, high, low, temp)


def merge_words(high: Words, low: Words, values: Words) -> None:
    """See `WordKernels.merge`."""
    _kernels.merge(high, low, values)


def use_kernels(kernels: WordKernels) -> None:
    """Split and merge that way from now on, in the whole process; calls that have begun end as they began."""
    global _kernels
    _kernels = kernels


def replace_after(coded_bytes: int, make: Callable[[], WordKernels | None]) -> None:
    """Have a thread make other kernels once so much was split or merged; numpy's do until they are ready.

    Not at once, so that a process that codes little does not pay for it.

    Args:
        coded_bytes: Payload bytes.
        make: Returns the kernels, None when there are none; must not raise.
    """
    left_bytes = coded_bytes  # threads may miss each other's counts: it comes a little later
    first = threading.Lock()  # whoever takes it makes them; never released

    def count(values: Words) -> None:
        nonlocal left_bytes
        left_bytes -= values.nbytes
        if left_bytes <= 0 and first.acquire(blocking=False):
            use_kernels(NUMPY)
            with suppress(RuntimeError):  # the system gives no thread: slower, not wrong
                threading.Thread(target=lambda: use_kernels(make() or NUMPY), name="kvtier-compile").start()

    def split(values: Words, high: Words, low: Words, temp: Words) -> None:
        count(values)
        _split(values, high, low, temp)

    def merge(high: Words, low: Words, values: Words) -> None:
        count(values)
        _merge(high, low, values)

    use_kernels(WordKernels(split, merge))
