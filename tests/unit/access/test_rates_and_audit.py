"""Rate limits with a clock of the test, and an audit log whose disk is full, whose file is renamed, or that is slow."""

import json
import os
import threading
from pathlib import Path

from kvtier.access import rate_limits
from kvtier.access.audit_log import AuditLog
from kvtier.access.rate_limits import BURST_CALLS, CALLS_PER_S, MAX_KEPT, MAX_WRONG, CallRates, WrongCredentials
from tests.fakes.scripted_engine import DEADLINE_S
from tests.fakes.waiting import wait_for


def test_wrong_credentials_of_an_address() -> None:
    wrong = WrongCredentials()
    assert [wrong.add("192.0.2.1", 0.0) for _ in range(MAX_WRONG + 2)] == [False] * MAX_WRONG + [True] * 2
    assert not wrong.add("192.0.2.2", 0.0)
    assert wrong.add("192.0.2.1", 59.9), "a minute after the last one"
    assert not wrong.add("192.0.2.1", 59.9 + rate_limits.WINDOW_S)


def test_one_host_with_many_ipv6_addresses_is_one() -> None:
    wrong = WrongCredentials()
    for number in range(MAX_WRONG):
        assert not wrong.add(f"2001:db8::{number:x}", 0.0)
    assert wrong.add("2001:db8::ffff", 0.0)
    assert not wrong.add("2001:db8:0:1::1", 0.0)
    for _ in range(MAX_WRONG):
        wrong.add("::ffff:192.0.2.1", 0.0)
    assert wrong.add("192.0.2.1", 0.0)


def test_tables_are_bounded() -> None:
    wrong, rates = WrongCredentials(), CallRates()
    for number in range(MAX_KEPT + 500):
        wrong.add(f"host-{number}", 0.0)
        rates.take(f"caller-{number}", 0.0)
    assert len(wrong) == len(rates) == MAX_KEPT


def test_calls_of_a_caller() -> None:
    rates = CallRates()
    assert sum(rates.take("a", 0.0) for _ in range(1000)) == BURST_CALLS
    assert rates.take("b", 0.0)
    assert sum(rates.take("a", 1.0) for _ in range(1000)) == CALLS_PER_S
    assert sum(rates.take("a", 1000.0) for _ in range(1000)) == BURST_CALLS


def entries(path: Path) -> list[object]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_file_that_is_renamed(tmp_path: Path) -> None:
    """As logrotate does it: rename, then SIGHUP."""
    path, old = tmp_path / "a", tmp_path / "a.1"
    log = AuditLog(path)
    log.add({"n": 1})
    wait_for(lambda: log.num_written == 1, DEADLINE_S)
    path.rename(old)
    log.add({"n": 2})
    wait_for(lambda: log.num_written == 2, DEADLINE_S)
    log.reopen()
    wait_for(path.exists, DEADLINE_S)
    log.add({"n": 3})
    log.close()
    assert (entries(old), entries(path)) == ([{"n": 1}, {"n": 2}], [{"n": 3}])
    assert (log.num_written, log.num_lost) == (3, 0)


def test_a_full_disk_loses_lines_and_no_call(tmp_path: Path) -> None:
    """It takes a part of a line first; the next line that is written begins on a line of its own."""
    path, left = tmp_path / "a", [30]

    def write(fd: int, data: bytes) -> int:
        part = data[: left[0]]
        left[0] -= len(part)
        if not part:
            raise OSError(28, "No space left on device")
        return os.write(fd, part)

    log = AuditLog(path, write=write)
    for number in range(5):
        log.add({"number": number, "filling": "x" * 10})
    wait_for(lambda: log.num_lost == 5, DEADLINE_S)
    left[0] = 10_000
    log.add({"number": 5})
    log.close()
    assert (log.num_written, log.num_lost) == (1, 5)
    torn, whole = path.read_text().splitlines()
    assert json.loads(whole) == {"number": 5}
    assert len(torn) == 30


def test_a_disk_that_hangs_delays_no_one(tmp_path: Path) -> None:
    hanging, begun = threading.Event(), threading.Event()

    def write(fd: int, data: bytes) -> int:
        begun.set()
        assert hanging.wait(DEADLINE_S)
        return os.write(fd, data)

    log = AuditLog(tmp_path / "a", max_waiting=3, write=write)
    log.add({"number": 0})
    assert begun.wait(DEADLINE_S)
    for number in range(1, 10):
        log.add({"number": number})
    assert log.num_lost == 6
    hanging.set()
    log.close()
    assert [entry["number"] for entry in entries(tmp_path / "a")] == [0, 1, 2, 3]  # type: ignore[index]


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "a"
    log = AuditLog(path)
    log.reopen()
    log.add({})
    wait_for(lambda: log.num_lost == 1, DEADLINE_S)
    path.parent.mkdir()
    log.add({})
    log.close()
    assert entries(path) == [{}]
    (tmp_path / "link").symlink_to(path)
    linked = AuditLog(tmp_path / "link")
    linked.add({"through": "a link"})
    linked.close()
    assert (entries(path), linked.num_lost) == ([{}], 1)


def test_off(tmp_path: Path) -> None:
    log = AuditLog(None)
    log.add({})
    log.reopen()
    log.close()
    assert (log.num_written, log.num_lost, list(tmp_path.iterdir())) == (0, 0, [])
