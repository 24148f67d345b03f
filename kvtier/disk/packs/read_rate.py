"""How fast a disk delivers: one scratch file, written and read back past the page cache."""

import os
import random
import time
from contextlib import suppress
from pathlib import Path

from kvtier.core.layout import ALIGNMENT_BYTES
from kvtier.disk.files.file_ops import FileOps
from kvtier.disk.files.scratch import ScratchPool
from kvtier.disk.packs.pack_spans import SPAN_BYTES

NUM_SPANS = 4
NUM_PASSES = 2


def measured_read_rate(path: Path, ops: FileOps, pool: ScratchPool) -> float | None:
    """Return bytes per second of one thread, None where the file system does not tell: no O_DIRECT, or an error.

    The better one of two passes counts: others may read too. Blocks for some tens of milliseconds on an SSD.

    Args:
        path: Of the scratch file, which is gone on return.
        ops: Every system call goes through it.
        pool: Its buffers hold a span.
    """
    buffer = pool.take(SPAN_BYTES)
    try:
        with memoryview(buffer) as whole, whole[:SPAN_BYTES] as span:
            return _rate(path, ops, span)
    except OSError:
        return None
    finally:
        pool.release(buffer)
        with suppress(OSError):  # what stays has a temporary name, and is swept
            ops.unlink(path)


def _rate(path: Path, ops: FileOps, span: memoryview) -> float:
    block = random.Random(0).randbytes(64 * ALIGNMENT_BYTES)
    for start in range(0, SPAN_BYTES, len(block)):
        span[start : start + len(block)] = block
    with ops.opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
        for number in range(NUM_SPANS):
            ops.write_all(fd, [span], number * SPAN_BYTES)
        ops.fsync(fd)
        ops.set_direct(fd, True)
        return max(_pass_rate(fd, ops, span) for _ in range(NUM_PASSES))


def _pass_rate(fd: int, ops: FileOps, span: memoryview) -> float:
    began_s = time.perf_counter()
    num_bytes = sum(ops.preadv(fd, [span], number * SPAN_BYTES) for number in range(NUM_SPANS))
    return num_bytes / (time.perf_counter() - began_s)
