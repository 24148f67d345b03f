"""`split32`: float32 values. The halves of the values apart, and their upper halves split as `split16` does.

A float32's upper half is a bfloat16: sign, exponent, seven bits of mantissa; the lower half is mantissa only.

    lower plane, word i (32 bits): lower half of v[i], then lower half of v[i + h]
    the same words of upper halves, taken as 16-bit values, are split into a high and a low plane as in `split16`
"""

from collections.abc import Sequence

import numpy as np

from kvtier.disk.codecs.planes import Bytes, PlaneCodec, ThreadScratch
from kvtier.disk.codecs.words import merge_words, split_words

_WORD = np.dtype("<u2")
_DOUBLE_WORD = np.dtype("<u4")


class Split32Codec(PlaneCodec):
    """Implements `Codec`. Planes: high bytes, low bytes of the upper halves, lower halves."""

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
        split_words(upper.view(_WORD), high, low, temp.view(_WORD)[: high.size])

    def merge(self, planes: Sequence[Bytes], block: Bytes, scratch: ThreadScratch) -> None:
        """See `PlaneCodec.merge`."""
        values, lower = block.view(_DOUBLE_WORD), planes[2].view(_DOUBLE_WORD)
        upper = scratch.words.view(_DOUBLE_WORD)[: lower.size]
        merge_words(planes[0].view(_WORD), planes[1].view(_WORD), upper.view(_WORD))
        first, second = values[: lower.size], values[lower.size :]
        np.bitwise_and(upper, 0xFFFF0000, out=second)
        np.left_shift(upper, 16, out=upper)
        np.bitwise_and(lower, 0x0000FFFF, out=first)
        np.bitwise_or(first, upper, out=first)
        np.right_shift(lower, 16, out=upper)
        np.bitwise_or(second, upper, out=second)
