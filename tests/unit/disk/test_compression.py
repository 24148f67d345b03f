"""When packs are written raw: the disk is faster than the decoder, and there is space."""

import pytest

from kvtier.config.model import CompressionMode
from kvtier.disk.codecs.decode_rate import measured_decode_rate
from kvtier.disk.compression import Compression

GB = 1e9


@pytest.mark.parametrize(
    ("num_cores", "read_rate", "decode_rate", "is_raw"),
    [
        (2, None, 3 * GB, False),
        (2, 1.4 * GB, 3 * GB, False),
        (2, 1.6 * GB, 3 * GB, True),
        (2, 0.4 * GB, 0.9 * GB, False),
        (2, 0.5 * GB, 0.9 * GB, True),
        (8, 5.9 * GB, 3 * GB, False),
        (8, 6.1 * GB, 3 * GB, True),
        (64, 8.9 * GB, 3 * GB, False),
        (64, 9.1 * GB, 3 * GB, True),
    ],
)
def test_what_the_disk_delivers_is_compared_with_what_three_threads_on_a_quarter_of_the_cores_decode(
    num_cores: int, read_rate: float | None, decode_rate: float, is_raw: bool
) -> None:
    compression = Compression("auto", num_threads=3, num_cores=num_cores)
    compression.measured(read_rate, decode_rate)
    assert compression.compresses(used_bytes=1, limit_bytes=100) is not is_raw
    assert compression.is_disk_faster is is_raw


def test_half_of_the_space_is_kept_for_what_is_compressed() -> None:
    compression = Compression("auto", num_threads=3, num_cores=2)
    compression.measured(3 * GB, 3 * GB)
    assert not compression.compresses(used_bytes=50, limit_bytes=100)
    assert compression.compresses(used_bytes=51, limit_bytes=100)


@pytest.mark.parametrize(("mode", "compresses"), [("always", True), ("never", False)])
def test_who_decides_decides(mode: CompressionMode, compresses: bool) -> None:
    compression = Compression(mode, num_threads=3, num_cores=2)
    compression.measured(3 * GB if compresses else 0.1 * GB, 3 * GB)
    assert not compression.must_measure
    assert compression.compresses(used_bytes=99, limit_bytes=100) is compresses


def test_this_process_cores_count() -> None:
    compression = Compression("auto", num_threads=1)
    assert compression.must_measure
    assert compression.compresses(used_bytes=0, limit_bytes=100), "nothing is measured yet"
    compression.measured(4 * GB, 3 * GB)
    assert not compression.compresses(used_bytes=0, limit_bytes=100)


def test_what_a_core_decodes_is_measured() -> None:
    assert 1e6 < measured_decode_rate() < 1e12
