"""Whether chunks are written compressed: where that makes reading them faster, or where space is short."""

import os

from kvtier.config.model import CompressionMode

FREE_CORES_SHARE = 4
"""Of this many cores one is free to decode: vLLM computes and waits on the others."""
RAW_SPACE_SHARE = 2
"""When one part of this many is used, everything new is compressed."""


class Compression:
    """Decides for each pack. Loop thread only.

    A chunk that is stored raw takes 1.5 times the reading, and no core. So it is the faster one where the disk delivers
    more than the cores that can be spared decode. Until both are measured, or where the disk cannot be, packs are
    compressed.

    Attributes:
        num_free_cores: Cores that vLLM leaves for decoding, at most one for each thread that does it.
        is_disk_faster: The disk delivers raw chunks faster than this machine decodes.
    """

    def __init__(self, mode: CompressionMode, num_threads: int, num_cores: int | None = None) -> None:
        """Decide for `num_threads` threads that decode, on that many cores, or those that this process may use."""
        self._mode = mode
        num_cores = num_cores or len(os.sched_getaffinity(0))
        self.num_free_cores = min(num_threads, num_cores / FREE_CORES_SHARE)
        self.is_disk_faster = False

    @property
    def must_measure(self) -> bool:
        """The decision depends on this machine."""
        return self._mode == "auto"

    def measured(self, read_bytes_per_s: float | None, decode_bytes_per_s: float) -> None:
        """Decide which is faster.

        Args:
            read_bytes_per_s: What one thread reads from the disk past the page cache; None: unknown.
            decode_bytes_per_s: What one core decodes, in bytes of payload.
        """
        self.is_disk_faster = (
            read_bytes_per_s is not None and read_bytes_per_s > self.num_free_cores * decode_bytes_per_s
        )

    def compresses(self, *, used_bytes: float, limit_bytes: float) -> bool:
        """Return whether a pack is compressed when, with it, `used_bytes` of the space are used."""
        if self._mode != "auto":
            return self._mode == "always"
        return not self.is_disk_faster or used_bytes > limit_bytes / RAW_SPACE_SHARE
