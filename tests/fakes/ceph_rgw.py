"""Ceph's gateway for S3 (RGW) with a cluster of one node: monitor, OSD in memory and gateway, all on loopback.

Needs Ceph's programs, no privileges and no configuration of the machine: everything is in a temporary folder, and is
gone with it. There is no manager daemon: nothing here needs what it does.
"""

import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.harness.process import Process, free_port
from tests.fakes.s3_server import CREDENTIALS, answers

PROGRAMS = ("monmaptool", "ceph-mon", "ceph-osd", "ceph", "radosgw", "radosgw-admin")
HINT = "apt-get install --no-install-recommends radosgw ceph-mon ceph-osd ceph-common"
_START_S = 120.0
_CONFIG = """
[global]
fsid = {fsid}
mon host = [v1:127.0.0.1:{mon_port}]
public network = 127.0.0.0/8
auth cluster required = none
auth service required = none
auth client required = none
osd objectstore = memstore
memstore device bytes = {device_bytes}
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
mon data avail crit = 0
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw run sync thread = false
run dir = {folder}
admin socket =
pid file =
keyring = {folder}/keyring
log file = {folder}/$name.log
mon cluster log file = {folder}/cluster.log
mon data = {folder}/mon
osd data = {folder}/osd
rgw data = {folder}/rgw
"""


def missing_programs() -> list[str]:
    """Return the programs of Ceph that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


@contextmanager
def ceph_rgw(device_bytes: int = 4 * 1024**3) -> Iterator[str]:
    """Run a gateway during the block; yields its URL, which is for AWS_ENDPOINT_URL.

    Args:
        device_bytes: Of objects, at most; they are in memory.
    """
    with tempfile.TemporaryDirectory(prefix="kvtier-ceph-") as name, ExitStack() as stack:
        folder, port = Path(name), free_port()
        fsid, osd_id, mon_port = str(uuid.uuid4()), str(uuid.uuid4()), free_port()
        config = folder / "ceph.conf"
        config.write_text(
            _CONFIG.format(fsid=fsid, mon_port=mon_port, port=port, folder=folder, device_bytes=device_bytes)
        )
        for part in ("mon", "osd", "rgw"):
            (folder / part).mkdir()

        def run(*command: str) -> None:
            done = subprocess.run(
                [*command, "-c", str(config)], capture_output=True, text=True, timeout=_START_S, check=False
            )
            assert done.returncode == 0, (command, done.stderr)

        def start(*command: str) -> Process:
            # No end in order: there is nothing to keep.
            argv = [_path(command[0]), *command[1:], "-f", "-c", str(config)]
            process = Process(command[0], argv, {}, folder / f"{command[0]}.out")
            stack.callback(process.kill)
            process.start()
            return process

        monmap = str(folder / "monmap")
        run("monmaptool", "--create", "--addv", "a", f"[v1:127.0.0.1:{mon_port}]", "--fsid", fsid, monmap)
        run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap)
        start("ceph-mon", "-i", "a")
        run("ceph", "osd", "new", osd_id)
        run("ceph-osd", "--mkfs", "-i", "0", "--osd-uuid", osd_id)
        start("ceph-osd", "-i", "0")
        gateway, url = start("radosgw", "-n", "client.rgw"), f"http://127.0.0.1:{port}"
        gateway.wait_ready(lambda: answers(url), _START_S)
        key, secret = CREDENTIALS["AWS_ACCESS_KEY_ID"], CREDENTIALS["AWS_SECRET_ACCESS_KEY"]
        user = ("--uid", "test", "--display-name", "test", "--access-key", key, "--secret", secret)
        run("radosgw-admin", "user", "create", *user)
        yield url


def _path(program: str) -> str:
    found = shutil.which(program)
    assert found is not None, f"{program} is not installed: {HINT}"
    return found
