"""When packs are written raw: the disk is faster than the decoder, and there is space."""

import pytest

from kvtier.config.model import CompressionMode
from kvtier.disk.compression import Compression

GB = 1e9


@pytest.mark.parametrize(
    ("num_cores", "read_rate", "is_raw"),
    [
        (2, None, False),
        (2, 1.4 * GB, False),
        (2, 1.6 * GB, True),
        (8, 5.9 * GB, False),
        (8, 6.1 * GB, True),
        (64, 8.9 * GB, False),
        (64, 9.1 * GB, True),
    ],
)
def test_what_the_disk_delivers_is_compared_with_what_three_threads_on_a_quarter_of_the_cores_decode(
    num_cores: int, read_rate: float | None, is_raw: bool
) -> None:
    compression = Compression("auto", num_threads=3, num_cores=num_cores)
    compression.read_bytes_per_s = read_rate
    assert compression.compresses(used_bytes=1, limit_bytes=100) is not is_raw
    assert compression.is_disk_faster is is_raw


def test_half_of_the_space_is_kept_for_what_is_compressed() -> None:
    compression = Compression("auto", num_threads=3, num_cores=2)
    compression.read_bytes_per_s = 3 * GB
    assert not compression.compresses(used_bytes=50, limit_bytes=100)
    assert compression.compresses(used_bytes=51, limit_bytes=100)


@pytest.mark.parametrize(("mode", "compresses"), [("always", True), ("never", False)])
def test_who_decides_decides(mode: CompressionMode, compresses: bool) -> None:
    compression = Compression(mode, num_threads=3, num_cores=2)
    compression.read_bytes_per_s = 3 * GB if compresses else 0.1 * GB
    assert not compression.must_measure
    assert compression.compresses(used_bytes=99, limit_bytes=100) is compresses


def test_this_process_cores_count() -> None:
    compression = Compression("auto", num_threads=1)
    assert compression.must_measure
    compression.read_bytes_per_s = 4 * GB
    assert not compression.compresses(used_bytes=0, limit_bytes=100)
