"""The servers that speak S3 and that tests run: moto's always, Ceph's gateway in `make test-fleet`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes.ceph_rgw import HINT, ceph_rgw, missing_programs
from tests.fakes.s3_server import make_bucket, s3_server

S3_SERVERS = ("moto", pytest.param("ceph", marks=pytest.mark.fleet))


@contextmanager
def running_server(kind: str, clock: Path | None = None) -> Iterator[str]:
    """Run a server with a bucket `fleet`; skip the test where its programs are not installed.

    Args:
        clock: Of moto's, see `s3_server`.
    """
    if kind == "ceph" and (missing := missing_programs()):
        pytest.skip(f"not installed: {', '.join(missing)}; {HINT}")
    with ceph_rgw() if kind == "ceph" else s3_server(clock) as url:
        make_bucket(url, "fleet")
        yield url
