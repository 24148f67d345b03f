"""The codecs of floats: `split16` for 16-bit values (bfloat16, float16), `split32` for float32. Layout: docs/format.md.

A float32's upper half is a bfloat16: sign, exponent, seven bits of mantissa. The lower half is mantissa only.
"""

from collections.abc import Sequence

import numpy as np

from kvtier.disk.codecs import words
from kvtier.disk.codecs.planes import Bytes, PlaneCodec, ThreadScratch

_WORD = np.dtype("<u2")
_DOUBLE_WORD = np.dtype("<u4")


class Split16Codec(PlaneCodec):
    """Planes: high bytes, low bytes."""

    name = "split16"
    item_bytes = 2
    unit_bytes = 4
    plane_bytes = (2, 2)

    def split(self, block: Bytes, planes: Sequence[Bytes], scratch: ThreadScratch) -> None:
        """See `PlaneCodec.split`."""
        high, low = planes[0].view(_WORD), planes[1].view(_WORD)
        words.kernels.split(block.view(_WORD), high, low, scratch.words.view(_WORD)[: high.size])

    def merge(self, planes: Sequence[Bytes], block: Bytes, scratch: ThreadScratch) -> None:
        """See `PlaneCodec.merge`."""
        words.kernels.merge(planes[0].view(_WORD), planes[1].view(_WORD), block.view(_WORD))


class Split32Codec(PlaneCodec):
    """Planes: high bytes and low bytes of the upper halves, split as `split16` does; lower halves.

    Word i (32 bits) of the lower plane: lower half of v[i], then lower half of v[i + h].
    """

    name = "split32"
    item_bytes = 4
    unit_bytes = 8
    plane_bytes = (2, 2, 4)

    def split(self, block: Bytes, planes: Sequence[Bytes], scratch: ThreadScratch) -> None:
        """See `PlaneCodec.split`."""
        values, lower = block.view(_DOUBLE_WORD), planes[2].view(_DOUBLE_WORD)
        upper = scratch.words.view(_DOUBLE_WORD)[: lower.size]
        temp = scratch.other_words.view(_DOUBLE_WORD)[: lower.size]
        first, second = values[: lower.size], values[lower.size :]
        np.right_shift(first, 16, out=upper)
        np.bitwise_and(second, 0xFFFF0000, out=temp)
        np.bitwise_or(upper, temp, out=upper)
        np.bitwise_and(first, 0x0000FFFF, out=lower)
        np.left_shift(second, 16, out=temp)
        np.bitwise_or(lower, temp, out=lower)
        high, low = planes[0].view(_WORD), planes[1].view(_WORD)
        words.kernels.split(upper.view(_WORD), high, low, temp.view(_WORD)[: high.size])

    def merge(self, planes: Sequence[Bytes], block: Bytes, scratch: ThreadScratch) -> None:
        """See `PlaneCodec.merge`."""
        values, lower = block.view(_DOUBLE_WORD), planes[2].view(_DOUBLE_WORD)
        upper = scratch.words.view(_DOUBLE_WORD)[: lower.size]
        words.kernels.merge(planes[0].view(_WORD), planes[1].view(_WORD), upper.view(_WORD))
        first, second = values[: lower.size], values[lower.size :]
        np.bitwise_and(upper, 0xFFFF0000, out=second)
        np.left_shift(upper, 16, out=upper)
        np.bitwise_and(lower, 0x0000FFFF, out=first)
        np.bitwise_or(first, upper, out=first)
        np.right_shift(lower, 16, out=upper)
        np.bitwise_or(second, upper, out=second)
