"""`split16`: 16-bit values (bfloat16, float16), high and low bytes apart, as `words` does."""

from collections.abc import Sequence

import numpy as np

from kvtier.disk.codecs.planes import Bytes, PlaneCodec, ThreadScratch
from kvtier.disk.codecs.words import merge_words, split_words

_WORD = np.dtype("<u2")


class Split16Codec(PlaneCodec):
    """Implements `Codec`."""

    name = "split16"
    item_bytes = 2
    unit_bytes = 4
    plane_bytes = (2, 2)

    def split(self, block: Bytes, planes: Sequence[Bytes], scratch: ThreadScratch) -> None:
        """See `PlaneCodec.split`."""
        high, low = planes[0].view(_WORD), planes[1].view(_WORD)
        split_words(block.view(_WORD), high, low, scratch.words.view(_WORD)[: high.size])

    def merge(self, planes: Sequence[Bytes], block: Bytes, scratch: ThreadScratch) -> None:
        """See `PlaneCodec.merge`."""
        merge_words(planes[0].view(_WORD), planes[1].view(_WORD), block.view(_WORD))
