"""How fast this machine decodes: bfloat16 noise, by the codec that real KV of that type gets."""

import time

import numpy as np

from kvtier.disk.codecs.split import Split16Codec

SAMPLE_BYTES = 256 * 1024
"""Of a payload; a block of the codec is no longer than that, and it stays in a core's cache."""
NUM_PASSES = 5


def measured_decode_rate() -> float:
    """Return payload bytes that one core decodes in a second of its own time, the best of some passes.

    Time that others take from this thread does not count: vLLM starts at the same moment. Blocks for some milliseconds.
    """
    # The upper halves of float32 values are bfloat16 values.
    values = np.random.default_rng(0).standard_normal(SAMPLE_BYTES // 2, np.float32)
    payload = np.ascontiguousarray(values.view(np.uint16)[1::2])
    codec = Split16Codec()
    pieces = codec.encode([payload.data.cast("B")])
    assert pieces is not None, "the sample is of a length that the codec takes"
    stored, into = memoryview(b"".join(pieces)), [memoryview(bytearray(SAMPLE_BYTES))]
    return max(_pass_rate(codec, stored, into) for _ in range(NUM_PASSES))


def _pass_rate(codec: Split16Codec, stored: memoryview, into: list[memoryview]) -> float:
    began_s = time.thread_time()
    codec.decode(stored, into)
    return SAMPLE_BYTES / max(time.thread_time() - began_s, 1e-6)
