"""`split16`: 16-bit values (bfloat16, float16), high and low bytes apart.

A block's values are halved, v[i] and v[i + h] share a word of each plane: so splitting and merging are six operations
on whole words, which numpy vectorizes; taking every other byte runs at a third of that speed.

    high plane, word i: high byte of v[i], then high byte of v[i + h]
    low plane, word i: low byte of v[i], then low byte of v[i + h]
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.tiers.codecs.planes import Bytes, PlaneCodec, Scratch

Words = npt.NDArray[np.uint16]
_WORD = np.dtype("<u2")


class Split16Codec(PlaneCodec):
    """Implements `Codec`."""

    name = "split16"
    item_bytes = 2
    unit_bytes = 4
    plane_bytes = (2, 2)

    def split(self, block: Bytes, planes: Sequence[Bytes], scratch: Scratch) -> None:
        """See `PlaneCodec.split`."""
        high, low = planes[0].view(_WORD), planes[1].view(_WORD)
        split_words(block.view(_WORD), high, low, scratch.words.view(_WORD)[: high.size])

    def merge(self, planes: Sequence[Bytes], block: Bytes, scratch: Scratch) -> None:
        """See `PlaneCodec.merge`."""
        merge_words(planes[0].view(_WORD), planes[1].view(_WORD), block.view(_WORD))


def split_words(values: Words, high: Words, low: Words, temp: Words) -> None:
    """Fill both planes; all but `values` have half its length."""
    first, second = values[: high.size], values[high.size :]
    np.right_shift(first, 8, out=high)
    np.bitwise_and(second, 0xFF00, out=temp)
    np.bitwise_or(high, temp, out=high)
    np.bitwise_and(first, 0x00FF, out=low)
    np.left_shift(second, 8, out=temp)
    np.bitwise_or(low, temp, out=low)


def merge_words(high: Words, low: Words, values: Words) -> None:
    """Undo `split_words`. Overwrites `high`: another buffer would not stay in the cache beside these."""
    first, second = values[: high.size], values[high.size :]
    np.bitwise_and(high, 0xFF00, out=second)
    np.left_shift(high, 8, out=high)
    np.bitwise_and(low, 0x00FF, out=first)
    np.bitwise_or(first, high, out=first)
    np.right_shift(low, 8, out=high)
    np.bitwise_or(second, high, out=second)
