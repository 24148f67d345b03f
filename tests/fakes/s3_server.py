"""A real S3 server in a process of its own: moto's, on loopback. It keeps objects in memory."""

import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness.process import free_port
from tests.fakes.shifted_clock import VARIABLE

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
_START_S = 60.0
_ROOT = Path(__file__).parents[2]


@contextmanager
def s3_server(clock: Path | None = None) -> Iterator[str]:
    """Run a server during the block; yields its URL, which is for AWS_ENDPOINT_URL.

    Args:
        clock: File that says how far its clock is ahead, see `shifted_clock`.
    """
    port = free_port()
    shifted = [] if clock is None else ["tests.fakes.shifted_clock"]
    command = [sys.executable, "-m", *shifted, "tests.fakes.moto_server", str(port)]
    environment = os.environ | ({} if clock is None else {VARIABLE: str(clock)})
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=_ROOT) as process,
    ):
        url = f"http://127.0.0.1:{port}"
        try:
            if not _is_up(url, process):
                log.seek(0)
                raise AssertionError(f"the S3 server did not start:\n{log.read()}")
            yield url
        finally:
            process.kill()


def make_bucket(url: str, name: str, *, keeps_versions: bool = False) -> None:
    """Make a bucket."""
    import boto3  # it takes a while, and few tests need it

    client = boto3.client(
        "s3",
        endpoint_url=url,
        aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        region_name=CREDENTIALS["AWS_REGION"],
    )
    client.create_bucket(Bucket=name)
    if keeps_versions:
        client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})


def answers(url: str) -> bool:
    """Return whether a server answers, be it by an error."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return True
    except OSError:
        return False


def _is_up(url: str, process: "subprocess.Popen[bytes]") -> bool:
    """Wait until it answers."""
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        if answers(url):
            return True
        time.sleep(0.1)
    return False
