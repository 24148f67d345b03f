"""The audit log, rotated by what configs/ has for logrotate, and read by the shipper of docs/access.md."""

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from kvtier import Client
from kvtier.access.audit_log import AuditLog
from kvtier.access.caller import LOCAL
from kvtier.access.gatekeeper import OK, Gatekeeper
from kvtier.access.grants import GrantBook
from kvtier.errors import PromptNotFoundError
from tests.fakes.daemon_process import daemon_command, daemon_process
from tests.fakes.scripted_engine import DEADLINE_S, config_in
from tests.fakes.waiting import wait_for
from tests.unit.deployment.shipped import CONFIGS, ROOT
from tests.unit.deployment.units import read_unit

DROP_IN = CONFIGS / "systemd" / "kvtier-daemon.service.d" / "listen.conf"
LOGROTATE = CONFIGS / "logrotate" / "kvtier"


def by_logrotate(path: Path, pid: int) -> None:
    """Rotate as the shipped file says, for the test's user and process."""
    shipped = LOGROTATE.read_text()
    text = (
        shipped.replace("/var/log/kvtier/audit.jsonl", str(path))
        .replace("    su kvtier kvtier\n", "")
        .replace("systemctl reload kvtier-daemon.service", f"kill -HUP {pid}")
    )
    assert len({shipped, text}) == 2
    config = path.parent / "logrotate.conf"
    config.write_text(text)
    config.chmod(0o600)
    subprocess.run(
        ["logrotate", "--force", "--state", str(path.parent / "state"), str(config)], check=True, timeout=DEADLINE_S
    )


def by_hand(path: Path, pid: int) -> None:
    number = len(list(path.parent.glob(f"{path.name}.*"))) + 1
    path.rename(path.with_name(f"{path.name}.{number}"))
    os.kill(pid, signal.SIGHUP)


needs_logrotate = pytest.mark.skipif(shutil.which("logrotate") is None, reason="logrotate is not installed")


@pytest.mark.parametrize("rotate", [by_hand, pytest.param(by_logrotate, marks=needs_logrotate)])
def test_no_line_of_the_audit_log_is_lost_by_rotation(tmp_path: Path, rotate: Callable[[Path, int], None]) -> None:
    """Calls go on meanwhile, and each is in one file, once."""
    folder = tmp_path / "logs"
    folder.mkdir(mode=0o700)
    path, config = folder / "audit.jsonl", config_in(tmp_path)
    command = ["env", f"KVTIER_ACCESS_AUDIT_FILE={path}", "KVTIER_HTTP_LISTEN=off", *daemon_command(config)]
    made, stopped = list[str](), threading.Event()

    def call() -> None:
        with Client(config.server.socket) as client:
            while not stopped.is_set():
                made.append(f"call-{len(made)}")
                with pytest.raises(PromptNotFoundError):
                    client.unpin(made[-1])

    def has_lines() -> bool:
        return path.exists() and path.stat().st_size > 0

    with daemon_process(command, tmp_path / "log") as process:
        caller = threading.Thread(target=call)
        caller.start()
        try:
            for _ in range(3):
                wait_for(has_lines, DEADLINE_S)
                rotate(path, process.pid)
            wait_for(has_lines, DEADLINE_S)
        finally:
            stopped.set()
            caller.join(DEADLINE_S)
    files = [each for each in folder.iterdir() if each.name.startswith(path.name)]
    assert len(files) == 4
    texts = [
        gzip.decompress(each.read_bytes()).decode() if each.suffix == ".gz" else each.read_text() for each in files
    ]
    assert all(texts)
    found = [json.loads(line)["names"][0] for text in texts for line in text.splitlines()]
    assert sorted(found) == sorted(made)


def test_the_shipper_of_the_docs_reads_the_drop_ins_file_and_its_time(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(parsers:.*?)```", (ROOT / "docs" / "access.md").read_text(), re.DOTALL)
    shipper = yaml.safe_load(text)
    (parser,), (tail,), (output,) = shipper["parsers"], shipper["pipeline"]["inputs"], shipper["pipeline"]["outputs"]
    path = read_unit(DROP_IN).environment["KVTIER_ACCESS_AUDIT_FILE"]
    assert tail["path"] == path
    assert f"{path} {{" in LOGROTATE.read_text()
    assert (tail["parser"], output["match"]) == (parser["name"], tail["tag"])
    audit = AuditLog(tmp_path / "audit.jsonl")
    Gatekeeper(GrantBook(tmp_path), audit).record(LOCAL, "Pin", OK)
    audit.close()
    line = json.loads((tmp_path / "audit.jsonl").read_text())
    given = datetime.strptime(line[parser["time_key"]], parser["time_format"].replace("%L", "%f"))
    assert abs(given.timestamp() - time.time()) < DEADLINE_S
