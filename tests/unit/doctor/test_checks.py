"""Each check by itself, on values: what it calls good, what not, and that it names a remedy."""

import os
import resource
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtier._pb.cache_pb2 import (
    DaemonStatus,
    KeyUsage,
    PromptBinding,
    PromptStatus,
    RefusedSharedPin,
    RemoteStatus,
    SessionStatus,
    TierStatus,
)
from kvtier.client.admin import AdminClient
from kvtier.client.remote_errors import RemoteError
from kvtier.config import DaemonConfig, DiskConfig, HostConfig, ServerConfig
from kvtier.doctor import daemon, machine, memory_and_disk, vllm_server
from kvtier.doctor.all_checks import _check_tiers, check_group
from kvtier.doctor.daemon import check_pin, check_pins
from kvtier.doctor.engine_environment import EngineEnvironment, check_environment_of_vllm, probe_environment
from kvtier.doctor.memory_and_disk import Mount, mount_of
from kvtier.doctor.report import CheckResult, Status
from kvtier.doctor.shared_store import check_remote
from kvtier.errors import RenderError
from kvtier.folders import LOCK_NAME
from kvtier.printable import MAX_LISTED, SHOWN_CHARS
from kvtier.version import __version__
from tests.fakes.keys import key_of_id, write_keys
from tests.fakes.scripted_engine import config_in

MIB, GIB, TIB = 1024**2, 1024**3, 1024**4
OK, WARN, FAIL, SKIPPED = Status.OK, Status.WARN, Status.FAIL, Status.SKIPPED


@pytest.mark.parametrize(
    ("system", "release", "status"),
    [
        ("Linux", "6.18.44-fc", OK),
        ("Linux", "4.18.0-553.el8_10.x86_64", OK),
        ("Linux", "3.10.0-1160", WARN),
        ("Darwin", "24.0.0", FAIL),
        ("Linux", "strange", FAIL),
    ],
)
def test_kernel(system: str, release: str, status: Status) -> None:
    assert machine.check_kernel(system, release).status is status


def test_open_files() -> None:
    assert machine.check_open_files(256).status is WARN
    assert machine.check_open_files(1024).status is OK
    assert machine.check_open_files(resource.RLIM_INFINITY).status is OK


def test_a_clock_behind_what_was_written_before(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.sqlite"
    assert machine.check_clock(1000.0, tmp_path, 0.0).status is OK, "nothing was written yet"
    ledger.touch()
    os.utime(ledger, (5000, 5000))
    assert machine.check_clock(5001.0, tmp_path, 0.0).status is OK
    assert machine.check_clock(4999.0, tmp_path, 0.0).status is OK, "a second is no lie"
    found = machine.check_clock(1400.0, tmp_path, 0.0)
    assert (found.status, "3600 s behind" in found.found) == (WARN, True)
    assert machine.check_clock(1000.0, None, 2000.0).status is WARN, "the daemon started in the future"


@pytest.mark.parametrize(
    ("text", "status", "found"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n",
            WARN,
            "535.129.03",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n", OK, "570.86.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.65.06  Release Build\n", OK, "580.65.06"),
        ("something else\n", SKIPPED, "names no version"),
    ],
)
def test_nvidia_driver(tmp_path: Path, text: str, status: Status, found: str) -> None:
    file = tmp_path / "version"
    assert machine.check_nvidia_driver(file).status is SKIPPED, "no GPU"
    file.write_text(text)
    checked = machine.check_nvidia_driver(file)
    assert checked.status is status
    assert found in checked.found


@pytest.mark.parametrize(
    ("kind", "status"),
    [("ext4", OK), ("xfs", OK), ("tmpfs", WARN), ("overlay", WARN), ("nfs4", WARN), ("fuse.sshfs", WARN)],
)
def test_file_systems_for_the_disk_tier(kind: str, status: Status) -> None:
    assert memory_and_disk.check_disk_file_system(Mount(point=Path("/x"), kind=kind)).status is status


def test_file_systems_for_arenas() -> None:
    assert memory_and_disk.check_arena_file_system(Mount(point=Path("/dev/shm"), kind="tmpfs")).status is OK
    assert memory_and_disk.check_arena_file_system(Mount(point=Path("/"), kind="ext4")).status is WARN
    assert (
        memory_and_disk.check_arena_file_system(None).status
        is memory_and_disk.check_disk_file_system(None).status
        is SKIPPED
    )


def test_the_deepest_and_last_mount_counts(tmp_path: Path) -> None:
    here = str(tmp_path).replace(" ", "\\040")
    table = tmp_path / "mountinfo"
    table.write_text(
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
        f"30 22 0:9 / {here} rw - nfs4 server:/x rw\n"
        f"31 30 0:9 / {here} rw shared:4 master:2 - xfs /dev/vdb rw\n"
        f"32 22 0:9 / {here}er rw - tmpfs tmpfs rw\n"
    )
    assert mount_of(tmp_path / "not" / "yet", table) == Mount(point=tmp_path, kind="xfs")
    assert mount_of(Path("/"), table) == Mount(point=Path("/"), kind="ext4")
    assert mount_of(tmp_path, tmp_path / "none") is None
    assert mount_of(Path("/")) is not None, "this machine's own table can be read"


def host(folder: Path, host_bytes: int) -> HostConfig:
    return HostConfig(arena_dir=folder, host_bytes=host_bytes)


def test_space_for_arenas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_and_disk, "filesystem_bytes", lambda folder: 64 * MIB)
    monkeypatch.setattr(memory_and_disk, "available_bytes", lambda folder: 32 * MIB)
    sizes = (32 * MIB, 33 * MIB, 65 * MIB)
    assert [memory_and_disk.check_arena_space(host(tmp_path, size)).status for size in sizes] == [OK, WARN, FAIL]
    assert "--shm-size" in memory_and_disk.check_arena_space(host(tmp_path, 65 * MIB)).remedy


def test_a_group_and_a_folder_that_may_not_be_looked_at() -> None:
    """It was a traceback; what keeps members out of the folders above is said, and the folder's own check says why."""
    config = DaemonConfig(
        server=ServerConfig(socket=Path("/run/s"), group="g", gid=os.getegid()),
        host=host(Path("/") / ("x" * 300), 0),
        disk=DiskConfig(disk_dir=Path("/x"), disk_bytes=0),
    )
    assert check_group(config).id == "socket.group"
    assert memory_and_disk.check_arena_dir(config.host.arena_dir).status is FAIL


def test_memory_for_arenas() -> None:
    sizes = (75, 76, 85, 86, 101)
    machine, container = ([memory_and_disk.check_memory(size, 100, of).status for size in sizes] for of in (100, 200))
    assert machine == [OK, WARN, WARN, WARN, FAIL]
    assert container == [OK, OK, OK, WARN, FAIL], "vLLM is in another one"


def test_the_arenas_of_a_daemon_in_another_container_must_be_here(tmp_path: Path) -> None:
    assert "under the same path" in memory_and_disk.check_shared_arena_dir(tmp_path, 7).remedy
    (tmp_path / LOCK_NAME).write_text("8\n")
    assert memory_and_disk.check_shared_arena_dir(tmp_path, 7).status is FAIL, "another daemon's folder of that name"
    assert memory_and_disk.check_shared_arena_dir(tmp_path, 8).status is OK


def test_folders(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for folder, status in ((tmp_path / "new" / "er", OK), (tmp_path / "file", FAIL), (tmp_path / "open", FAIL)):
        assert memory_and_disk.check_disk_dir(folder).status is memory_and_disk.check_arena_dir(folder).status is status
    assert memory_and_disk.check_disk_dir(tmp_path / "file" / "below").status is FAIL
    assert not (tmp_path / "new").exists(), "a check makes nothing"


def test_space_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_and_disk, "available_bytes", lambda folder: 100 * MIB)

    def status(disk_bytes: int, reserve_bytes: int) -> Status:
        config = DiskConfig(disk_dir=tmp_path, disk_bytes=disk_bytes, reserve_bytes=reserve_bytes)
        return memory_and_disk.check_disk_space(config).status

    assert status(90 * MIB, 10 * MIB) is OK
    assert status(91 * MIB, 10 * MIB) is WARN
    assert status(MIB, 100 * MIB) is FAIL


def test_direct_reads_are_tried_without_leaving_a_file(tmp_path: Path) -> None:
    assert memory_and_disk.check_direct_reads(tmp_path / "new").status in (OK, WARN, SKIPPED)
    assert list(tmp_path.iterdir()) == []


def test_a_socket_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "_USUAL_PLACES", ((str(tmp_path), "kvtier-[0-9]*"),))
    missing = daemon.check_socket(tmp_path / "none")
    assert [(f.id, f.status) for f in missing] == [("socket.path", FAIL), ("socket.others", OK)]
    (tmp_path / "kvtier-1234").mkdir()
    *_, others = daemon.check_socket(tmp_path / "none")
    assert (others.status, "kvtier-1234 (uid " in others.found) == (WARN, True)
    (tmp_path / "file").touch()
    (no_socket,) = daemon.check_socket(tmp_path / "file")
    assert (no_socket.status, "not a socket" in no_socket.found) == (FAIL, True)


def test_whose_socket_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
        path.chmod(0o700)
        assert [finding.status for finding in daemon.check_socket(path)] == [OK, OK, SKIPPED], "no process listens"
        bound.listen()
        assert [finding.status for finding in daemon.check_socket(path)] == [OK, OK, OK]
        path.chmod(0o777)
        tmp_path.chmod(0o700)
        assert daemon.check_socket(path)[1].status is OK, "its folder keeps others out"
        tmp_path.chmod(0o755)
        assert daemon.check_socket(path)[1].status is WARN
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    other = daemon.check_owner(path, 1001, 0o700)
    assert (other.status, "as one user" in other.remedy) == (WARN, True)
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert daemon.check_owner(path, 1001, 0o700).status is OK, "root may use all arenas"


def test_a_folder_that_anybody_may_write_to_is_said_with_and_without_a_socket(tmp_path: Path) -> None:
    folder = tmp_path / "all"
    folder.mkdir()
    folder.chmod(0o777)
    with socket.socket(socket.AF_UNIX) as listener:
        for path in (folder / "none", folder / "s"):
            (refused,) = [f for f in daemon.check_socket(path) if f.id == "socket.trusted"]
            assert (refused.status, f"may write to {folder}" in refused.found) == (FAIL, True)
            answer = daemon.ask_daemon(path, None, [refused])
            assert (answer.finding.status, answer.finding.found) == (SKIPPED, "the socket is not trusted")
            listener.bind(str(folder / "s")) if not (folder / "s").exists() else listener.listen()


def test_without_a_daemon_its_checks_are_skipped() -> None:
    assert {finding.status for finding in daemon.check_daemon(None)} == {SKIPPED}
    assert [finding.status for finding in check_pins(None)] == [SKIPPED]


def engine(**fields: object) -> SessionStatus:
    return SessionStatus(engine_id="e", pid=7, model_names=["toy"], **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "check", "status"),
    [
        (DaemonStatus(), "", OK),
        (DaemonStatus(version="0.0.1"), "daemon.version", WARN),
        (DaemonStatus(sessions=[engine(quarantined=True)]), "daemon.engines", WARN),
        (DaemonStatus(disk=TierStatus(breaker_open_reason="EIO")), "daemon.disk_tier", FAIL),
        (DaemonStatus(disk_keys=[KeyUsage(name="k1.0a", writes=True)]), "", OK),
        (DaemonStatus(disk_keys=[KeyUsage(name="k0.0b", is_missing=True, num_bytes=5)]), "daemon.keys", FAIL),
        (DaemonStatus(counters={"damaged_chunks_disk": 2}), "daemon.damage", WARN),
        (DaemonStatus(counters={"damaged_chunks_host": 1}), "daemon.damage", WARN),
        (DaemonStatus(counters={"remote_damaged_chunks": 1}), "daemon.damage", WARN),
        (DaemonStatus(http_problem="cannot listen there"), "daemon.http", WARN),
    ],
)
def test_what_the_daemon_says(changed: DaemonStatus, check: str, status: Status) -> None:
    healthy = DaemonStatus(version=__version__, sessions=[engine()], http_url="http://127.0.0.1:9464")
    healthy.MergeFrom(changed)
    found = {finding.id: finding.status for finding in daemon.check_daemon(healthy)}
    assert found == {name: status if name == check else OK for name in found}
    empty = {finding.id: finding.status for finding in daemon.check_daemon(DaemonStatus())}
    assert (empty["daemon.engines"], empty["daemon.http"]) == (WARN, SKIPPED)


def test_damage_is_reported_by_place_with_what_to_do_there() -> None:
    """Of damage in memory it said that there was none, and only the disk was to be checked."""
    status = DaemonStatus(counters={"damaged_chunks_disk": 2, "tampered_chunks": 1, "damaged_chunks_host": 3})
    disk, memory = (each for each in daemon.check_daemon(status) if each.id == "daemon.damage")
    assert disk.found == "since the daemon started: damaged_chunks_disk 2, tampered_chunks 1"
    assert memory.found == "since the daemon started: damaged_chunks_host 3"
    assert "check the disk" in disk.remedy
    assert "test this host's memory" in memory.remedy


def prompt(**fields: object) -> PromptStatus:
    return PromptStatus(name="support", pinned=True, state=PromptStatus.DURABLE, **fields)  # type: ignore[arg-type]


def test_pins_and_why_they_are_not_kept() -> None:
    binding = PromptBinding(num_chunks=4, num_durable_chunks=3)
    cases = {
        "too long": prompt(error="the prompt is too long"),
        "1 of 2 engines": prompt(num_engines=2, num_confirmed=1),
        "not yet turned into tokens": PromptStatus(name="p", pinned=True, state=PromptStatus.UNRENDERED),
        "no vLLM": PromptStatus(name="p", pinned=True, state=PromptStatus.WAITING),
        "3 of 4 chunks": PromptStatus(name="p", pinned=True, state=PromptStatus.CAPTURING, bindings=[binding]),
        "does not fit": PromptStatus(name="p", pinned=True, state=PromptStatus.OVER_QUOTA),
    }
    for said, status in cases.items():
        found = check_pin(status)
        assert (found.status, said in found.found) == (WARN, True), found
    *broken, last = check_pins([*cases.values(), prompt(), PromptStatus(name="not pinned")])
    assert len(broken) == len(cases)
    assert (last.status, last.found) == (OK, "1 of 7 pinned prompts are durable")


@pytest.mark.parametrize(
    ("origin", "remedy"), [("named", "`kvtier pin p`"), ("auto", "next request"), ("request", "next")]
)
def test_what_stores_the_rest_of_a_prompt(origin: str, remedy: str) -> None:
    capturing = PromptStatus(name="p", pinned=True, state=PromptStatus.CAPTURING, origin=origin)
    assert remedy in check_pin(capturing).remedy


def test_many_broken_pins_are_not_all_listed() -> None:
    waiting = PromptStatus(name="p", pinned=True, state=PromptStatus.WAITING)
    findings = check_pins([waiting] * (MAX_LISTED + 5))
    assert len(findings) == MAX_LISTED + 1
    assert findings[-1].found == "5 more are not durable"


class ServerDouble:
    """A vLLM with canned answers."""

    def __init__(
        self, version: str = "0.32.1", error: RenderError | None = None, algorithm: str = "", caching: str = ""
    ) -> None:
        self._version, self._error = version, error
        self._cache_config = {"enable_prefix_caching": caching, "prefix_caching_hash_algo": algorithm}

    def version(self) -> str:
        if self._error:
            raise self._error
        return self._version

    def cache_config(self) -> Mapping[str, str]:
        return self._cache_config

    def model_names(self) -> Sequence[str]:
        return ["toy", "toy-alias"]


CONNECTOR = EngineEnvironment(vllm="0.32.0", series=("0.32",), hashes=("sha256", "sha256_cbor"))


def statuses(server: ServerDouble | None, status: DaemonStatus | None) -> list[Status]:
    return [finding.status for finding in vllm_server.check_server(server, CONNECTOR, status)]


def test_a_vllm_server() -> None:
    attached = DaemonStatus(sessions=[engine()])
    assert statuses(None, attached) == [SKIPPED] * 4
    assert statuses(ServerDouble(error=RenderError("refused")), attached) == [FAIL, SKIPPED, SKIPPED, SKIPPED]
    assert statuses(ServerDouble(algorithm="sha256_cbor", caching="True"), attached) == [OK] * 4
    assert statuses(ServerDouble(), None) == [OK, SKIPPED, SKIPPED, SKIPPED], "its metrics do not say"
    bad = ServerDouble("0.33.0", algorithm="xxhash", caching="False")
    lost = DaemonStatus(sessions=[engine(quarantined=True)])
    assert statuses(bad, lost) == [FAIL, FAIL, WARN, FAIL]


@pytest.mark.parametrize(
    ("environment", "named", "expected"),
    [
        (CONNECTOR, True, [OK, OK]),
        (EngineEnvironment(series=("0.32",)), False, [SKIPPED, SKIPPED]),
        (EngineEnvironment(series=("0.32",)), True, [FAIL, SKIPPED]),
        (EngineEnvironment(vllm="0.31.2", series=("0.32",), problem="ImportError: x"), False, [FAIL, FAIL]),
        (EngineEnvironment(vllm="0.32.0", problem="ModuleNotFoundError: kvtier"), True, [OK, FAIL]),
    ],
)
def test_the_environment_of_vllm(environment: EngineEnvironment, named: bool, expected: list[Status]) -> None:
    findings = check_environment_of_vllm(environment, Path("/v/python") if named else None)
    assert [finding.status for finding in findings] == expected


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    return write


def test_a_python_without_kvtier_says_so(script: Callable[[str], Path]) -> None:
    bare = script(f'exec {sys.executable} -I -S "$@"')
    assert probe_environment(bare).problem == "ModuleNotFoundError: No module named 'kvtier'"


def test_a_python_of_the_working_directory(script: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """`--python venv/bin/python` could not be run: it was looked for below /."""
    real = script(f'exec {sys.executable} "$@"')
    monkeypatch.chdir(real.parent.parent)
    assert probe_environment(real.relative_to(real.parent.parent)).series
    assert probe_environment(Path("sh")).problem.startswith("sh: "), "a name alone is that of a program in $PATH"


def test_what_is_no_python_is_a_finding_and_no_traceback(script: Callable[[str], Path], tmp_path: Path) -> None:
    missing = probe_environment(tmp_path / "none")
    assert "cannot be run" in missing.problem
    advice = [finding.remedy for finding in check_environment_of_vllm(missing, tmp_path / "none")]
    assert advice == ["name the interpreter that vLLM runs with: --python"] * 2, "it was: install kvtier there"
    assert probe_environment(script("echo nonsense >&2; exit 3")).problem == "nonsense"
    assert probe_environment(script("exit 3")).problem == "it ended with status 3"
    assert probe_environment(script(r"printf 'caf\351' >&2; exit 3")).problem == "caf\ufffd", "it was a traceback"
    assert len(probe_environment(script("printf '%9999s' x >&2")).problem) <= SHOWN_CHARS
    assert len(probe_environment(script("""printf '{"problem": "%9999s"}' x""")).problem) <= SHOWN_CHARS
    for strange in ("5", "[]", '{"problem": "", "more": 2}'):
        assert probe_environment(script(f"echo '{strange}'")).problem == "it ended with status 0"


def test_a_finding_cannot_forget_its_remedy() -> None:
    with pytest.raises(AssertionError):
        CheckResult(id="disk.dir", status=WARN, found="x")
    with pytest.raises(AssertionError):
        CheckResult(id="disk.directory", status=OK, found="x")
    assert check_pin(prompt()).remedy == ""


def test_a_daemon_that_refuses_is_not_one_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It said that no daemon answers, when the daemon's list was too long for a message."""

    def refuse(_: AdminClient) -> None:
        raise RemoteError("RESOURCE_EXHAUSTED", "", "Sent message larger than max")

    monkeypatch.setattr(AdminClient, "status", refuse)
    answer = daemon.ask_daemon(tmp_path / "d.sock", None, ())
    assert (answer.finding.status, answer.status) == (Status.FAIL, None)
    assert "answers, but refuses" in answer.finding.found
    assert "larger than max" in answer.finding.found
    assert "start it" not in answer.finding.remedy


def test_the_store_that_hosts_share() -> None:
    def of_store(**fields: Any) -> list[CheckResult]:
        return check_remote(RemoteStatus(url="s3://bucket/kvtier", looked_unix_s=1.0, **fields))

    assert [check_remote(each)[0].status for each in (None, RemoteStatus())] == [SKIPPED, SKIPPED]
    assert [found.status for found in of_store(num_pins=3)] == [OK]
    (found,) = check_remote(RemoteStatus(url="s3://bucket/kvtier"))
    assert (found.status, "not read yet" in found.found) == (WARN, True)
    (found,) = of_store(problem="403 Forbidden")
    assert (found.status, "403 Forbidden" in found.found) == (FAIL, True)
    ahead, behind = of_store(clock_offset_s=-90.0), of_store(clock_offset_s=90.0)
    assert ("90 s ahead of" in ahead[0].found, "90 s behind" in behind[0].found) == (True, True)
    refused = [RefusedSharedPin(name=f"p{number}", why="too long") for number in range(MAX_LISTED + 3)]
    warned = of_store(refused=refused)
    assert [found.status for found in warned] == [WARN] * MAX_LISTED
    assert "p0: too long" in warned[0].found


def test_a_shared_folder_whose_times_are_each_hosts_own(tmp_path: Path) -> None:
    """TTLs and the age of what may be deleted go by the store's clock, and it has none."""
    table = tmp_path / "mountinfo"
    for kind, status in (("ceph", WARN), ("lustre", WARN), ("fuse.glusterfs", WARN), ("nfs4", OK), ("ext4", OK)):
        table.write_text(f"30 1 8:2 / {tmp_path} rw,relatime shared:2 - {kind} server:/ rw\n")
        (found,) = check_remote(RemoteStatus(url=f"file://{tmp_path}/shared", looked_unix_s=1.0), table)
        assert (found.status, kind in found.found) == (status, status is WARN)
        (found,) = check_remote(RemoteStatus(url="s3://bucket/kvtier", looked_unix_s=1.0), table)
        assert found.status is OK


def test_a_line_that_was_removed_from_the_file_of_keys_is_found_before_the_restart(tmp_path: Path) -> None:
    """All was well until the daemon started again: then packs were misses, or a pin refused the start."""
    keys, old, new = write_keys(tmp_path / "keys", "new"), key_of_id("old").name, key_of_id("new").name
    plain, writes = KeyUsage(num_bytes=7), KeyUsage(name=new, writes=True)
    check = memory_and_disk.check_key_file
    assert check(keys, [writes, plain, KeyUsage(name=old)]).status is OK, "nothing is under the old one"
    found = check(keys, [writes, KeyUsage(name=old, num_bytes=2 * MIB)])
    assert found.status is FAIL
    assert f"{old} (2.00 MiB of packs)" in found.found
    assert new not in found.found
    missing = KeyUsage(name=old, num_bytes=2 * MIB, is_missing=True)
    assert check(keys, [writes, missing]).status is OK, "daemon.keys says so"
    (tmp_path / "keys").unlink()
    assert check(write_keys(tmp_path / "keys", "old"), [writes]).status is FAIL, "prompts are under it"
    assert check(None, [writes]).status is WARN, "perhaps the daemon has other settings"
    assert check(None, [plain]).status is OK


def test_the_doctor_compares_the_file_of_keys_with_the_daemon_that_runs(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    config = replace(config, disk=replace(config.disk, key_file=write_keys(tmp_path / "keys", "new")))
    (tmp_path / LOCK_NAME).write_text("8\n")
    here = TierStatus(location=str(tmp_path))
    status = DaemonStatus(pid=8, host=here, disk=here, disk_keys=[KeyUsage(name="old.0a", num_bytes=5)])
    (found,) = (each for each in _check_tiers(config, status) if each.id == "disk.key_file")
    assert (found.status, "old.0a" in found.found) == (FAIL, True)
