"""export, import and fsck as a user types them, against a real daemon."""

import asyncio
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import safe_open
from typer.testing import CliRunner, Result

from kvtier.cli.app import app
from kvtier.cli.commands import export_import
from kvtier.client.admin import AdminClient
from kvtier.config import DaemonConfig
from kvtier.daemon.folder_locks import locked
from kvtier.library.connection import Connection
from tests.fakes.fsck import assert_clean
from tests.fakes.operator import pin
from tests.fakes.scripted_engine import DEADLINE_S, ScriptedEngine, chunk_key, config_in, running, wait_durable

KEYS = [chunk_key(n) for n in range(5)]
Run = Callable[..., Result]


@contextmanager
def daemon(config: DaemonConfig, *, prompt: bool = False) -> Iterator[Run]:
    """Run a daemon, locked as the program locks it, with an engine; yields the CLI. With `prompt`, p is durable."""
    ready, stop = threading.Event(), threading.Event()
    failure: list[BaseException] = []

    async def serve() -> None:
        async with running(config) as stub, ScriptedEngine(config) as engine:
            if prompt:
                await engine.bind(await pin(stub), KEYS)
                await engine.store(KEYS)
                await wait_durable(stub, "p")
            ready.set()
            await asyncio.to_thread(stop.wait)

    def main() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            failure.append(error)
        finally:
            ready.set()

    with ExitStack() as stack:
        stack.enter_context(locked(config.disk.disk_dir))
        thread = threading.Thread(target=main)
        thread.start()
        try:
            assert ready.wait(DEADLINE_S)
            assert not failure, failure
            yield cli(config)
        finally:
            stop.set()
            thread.join(DEADLINE_S)
    assert not failure, failure


def cli(config: DaemonConfig) -> Run:
    def run(*arguments: object, input: bytes | None = None) -> Result:
        return CliRunner().invoke(app, ["--socket", str(config.server.socket), *map(str, arguments)], input=input)

    return run


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings of the machine's."""
    for name in list(os.environ):
        if name.startswith("KVTIER_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no-config"))


@pytest.fixture
def config(tmp_path: Path) -> DaemonConfig:
    (tmp_path / "one").mkdir()
    return config_in(tmp_path / "one")


@pytest.fixture
def other(tmp_path: Path) -> DaemonConfig:
    (tmp_path / "other").mkdir()
    return config_in(tmp_path / "other")


def test_a_prompt_travels_by_file(config: DaemonConfig, other: DaemonConfig, tmp_path: Path) -> None:
    bundle = tmp_path / "p.safetensors"
    with daemon(config, prompt=True) as kvtier:
        result = kvtier("export", "p", bundle)
        assert result.exit_code == 0, result.output
        assert f"exported: p to {bundle}" in result.output
        assert "80 tokens, 5 chunks, " in result.output
        assert bundle.stat().st_mode & 0o777 == 0o600
        assert [path.name for path in tmp_path.glob("*p.*")] == ["p.safetensors"]
    with daemon(other) as kvtier:
        result = kvtier("import", bundle, "--name", "q", "--ttl", "7d")
        assert result.exit_code == 0, result.output
        assert f"imported: q from {bundle}" in result.output
        assert "5/5 chunks" in result.output
        assert json.loads(kvtier("import", bundle, "--json").output)["state"] == "DURABLE"
        assert kvtier("fsck", "--deep").exit_code == 0
    assert_clean(other.disk.disk_dir)


def test_export_overwrites_only_by_force_and_leaves_nothing_after_an_error(
    config: DaemonConfig, tmp_path: Path
) -> None:
    folder = tmp_path / "bundles"
    folder.mkdir()
    bundle = folder / "p"
    bundle.write_text("mine")
    with daemon(config, prompt=True) as kvtier:
        result = kvtier("export", "p", bundle)
        assert (result.exit_code, bundle.read_text()) == (2, "mine")
        assert "--force" in result.output
        assert kvtier("export", "unknown", folder / "x").exit_code == 1
        assert kvtier("export", "p", folder / "missing" / "x").exit_code == 2
        assert kvtier("export", "p", folder / "x", "--namespace", "ffff").exit_code == 1
        assert [path.name for path in folder.iterdir()] == ["p"]
        answer = json.loads(kvtier("export", "p", bundle, "--force", "--json").output)
        assert answer["bytes"] == bundle.stat().st_size > 5000


def test_a_prompt_travels_through_a_pipe(
    config: DaemonConfig, other: DaemonConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`-` was a file called `-`."""
    monkeypatch.chdir(tmp_path)
    with daemon(config, prompt=True) as kvtier:
        kvtier("export", "p", "file")
        result = kvtier("export", "p", "-")
        assert result.exit_code == 0, result.output
        assert "exported: p to stdout" in result.stderr
        assert result.stdout_bytes == Path("file").read_bytes()
        assert not Path("-").exists()
        assert kvtier("export", "p", "-", "--json").exit_code == 2
        assert kvtier("export", "unknown", "-").stdout_bytes == b""
    with daemon(other) as kvtier:
        cut = kvtier("import", "-", input=result.stdout_bytes[:-1])
        assert (cut.exit_code, "cut short" in " ".join(cut.output.split())) == (1, True)
        assert "has 0 bytes" in " ".join(kvtier("import", "-", input=b"").output.split())
        answer = kvtier("import", "-", "--name", "q", input=result.stdout_bytes)
        assert answer.exit_code == 0, answer.output
        assert "imported: q from stdin" in answer.output
        assert "5/5 chunks" in answer.output


@pytest.mark.parametrize(
    ("command", "stream", "remedy"),
    [
        (("export", "p", "-"), "stdout", "kvtier export p - > FILE"),
        (("import", "-"), "stdin", "kvtier import - < FILE"),
    ],
)
def test_a_terminal_gets_and_gives_no_bundle(
    config: DaemonConfig, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], stream: str, remedy: str
) -> None:
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(export_import, "sys", SimpleNamespace(**{stream: terminal}))
    result = cli(config)(*command)
    assert result.exit_code == 2
    assert result.stdout_bytes == b""
    said = " ".join(result.stderr.split())
    assert f"{stream} is a terminal" in said
    assert remedy in said


def test_a_decoded_export_is_for_reading(config: DaemonConfig, tmp_path: Path) -> None:
    file = tmp_path / "p.safetensors"
    with daemon(config, prompt=True) as kvtier:
        result = kvtier("export", "p", file, "--decoded")
        assert result.exit_code == 0, result.output
        with safe_open(file, framework="np") as opened:
            assert opened.get_tensor("kvtier.tokens").tolist() == list(range(80))
            assert opened.get_tensor("group0").shape == (5, 6000)
        result = kvtier("import", file)
        assert result.exit_code == 1
        assert "for reading only; export without it" in " ".join(result.output.split())


def test_an_interrupted_export_leaves_nothing(
    config: DaemonConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = AdminClient.export

    def interrupted(self: AdminClient, request: object) -> Iterator[bytes]:
        yield next(iter(original(self, request)))  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(AdminClient, "export", interrupted)
    folder = tmp_path / "bundles"
    folder.mkdir()
    with daemon(config, prompt=True) as kvtier:
        result = kvtier("export", "p", folder / "p")
        assert result.exit_code == 130
        assert "interrupted; nothing was written" in result.output
        assert list(folder.iterdir()) == []


def test_import_says_what_is_wrong(config: DaemonConfig, other: DaemonConfig, tmp_path: Path) -> None:
    bundle = tmp_path / "p.safetensors"
    with daemon(config, prompt=True) as kvtier:
        kvtier("export", "p", bundle)
    with daemon(other) as kvtier:
        data = bytearray(bundle.read_bytes())
        data[-1] ^= 1
        bundle.write_bytes(data)
        result = kvtier("import", bundle)
        assert result.exit_code == 1
        assert "is not what was written; copy it again" in " ".join(result.output.split())
        assert kvtier("import", tmp_path / "nowhere").exit_code == 2
        assert kvtier("import", bundle, "--ttl", "soon").exit_code == 2


def test_fsck_online_finds_and_repairs(config: DaemonConfig) -> None:
    with daemon(config, prompt=True) as kvtier:
        result = kvtier("fsck")
        assert (result.exit_code, result.output.splitlines()[-1]) == (0, "clean"), result.output
        for pack in (config.disk.disk_dir / "packs").iterdir():
            pack.unlink()
        result = kvtier("fsck")
        assert result.exit_code == 1
        assert "pack-missing" in result.output
        assert "repair with: kvtier fsck --repair" in result.output
        result = kvtier("fsck", "--repair")
        assert (result.exit_code, "clean now" in result.output) == (0, True), result.output
        report = json.loads(kvtier("fsck", "--json", "--deep").output)
        assert [finding for finding in report["findings"] if not finding["code"].startswith("note-")] == []
        result = kvtier("fsck", "--offline", "--disk-dir", config.disk.disk_dir)
        assert result.exit_code == 3
        assert "run `kvtier fsck` without --offline" in " ".join(result.output.split())


def test_fsck_offline_rebuilds_a_lost_ledger(config: DaemonConfig) -> None:
    with daemon(config, prompt=True):
        pass
    kvtier, folder = cli(config), config.disk.disk_dir
    for path in folder.glob("ledger.sqlite*"):
        path.unlink()
    result = kvtier("fsck", "--offline", "--disk-dir", folder)
    assert (result.exit_code, "ledger-missing" in result.output) == (1, True), result.output
    again = f"repair with: kvtier fsck --repair --offline --disk-dir {folder}"
    assert again in " ".join(result.output.split()), "without these it repaired another daemon's"
    result = kvtier("fsck", "--offline", "--disk-dir", folder, "--repair", "--json")
    assert result.exit_code == 0, result.output
    findings = json.loads(result.output)["findings"]
    assert all(finding["repaired"] for finding in findings if not finding["code"].startswith("note-"))
    assert "clean" in kvtier("fsck", "--offline", "--disk-dir", folder, "--deep").output


def test_fsck_without_a_daemon_checks_the_configured_directory_and_names_it(
    config: DaemonConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with daemon(config, prompt=True):
        pass
    folder = config.disk.disk_dir
    monkeypatch.setenv("KVTIER_DISK_DIR", str(folder))
    monkeypatch.setenv("KVTIER_SOCKET", str(config.server.socket))
    monkeypatch.setenv("COLUMNS", "300")
    result = CliRunner().invoke(app, ["fsck"])
    assert result.exit_code == 0, result.output
    assert "checking the disk folder of the local settings, offline" in result.output
    assert f"checked offline: {folder}: " in result.output
    assert " packs, 5 chunks" in result.output
    assert json.loads(CliRunner().invoke(app, ["fsck", "--json"]).stdout)["offline_folder"] == str(folder)
    assert cli(config)("fsck", "--disk-dir", "x").exit_code == 2
    assert cli(config)("fsck", "--offline", "--disk-dir", folder / "no").exit_code == 2


@pytest.mark.parametrize("state", ["dead", "stopped"])
def test_fsck_of_a_named_daemon_that_does_not_answer_checks_nothing_else(
    config: DaemonConfig, other: DaemonConfig, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """It checked the folder of the settings, which was another daemon's, and said `clean`."""
    with daemon(other, prompt=True):
        pass
    monkeypatch.setenv("KVTIER_DISK_DIR", str(other.disk.disk_dir))
    impatient = {**(Connection.__init__.__kwdefaults__ or {}), "timeout_s": 0.2}
    monkeypatch.setattr(Connection.__init__, "__kwdefaults__", impatient)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(config.server.socket))
        if state == "stopped":
            silent.listen()
        result = cli(config)("fsck")
    said = " ".join(result.output.split())
    assert (result.exit_code, "clean" in said) == (3, False), said
    assert str(config.server.socket) in said
    assert "start it" in said
    assert "kvtier fsck --offline --disk-dir DIR" in said


def test_fsck_of_a_daemon_on_another_host_that_does_not_answer_touches_nothing_here(
    config: DaemonConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --repair it repaired the folder of this host's settings instead."""
    with daemon(config, prompt=True):
        pass
    folder = config.disk.disk_dir
    (folder / "ledger.sqlite").unlink()
    before = sorted(folder.rglob("*"))
    monkeypatch.setenv("KVTIER_DISK_DIR", str(folder))
    result = CliRunner().invoke(app, ["fsck", "--repair"], env={"KVTIER_SERVER": "127.0.0.1:1"})
    said = " ".join(result.output.split())
    assert result.exit_code == 3, said
    assert "at 127.0.0.1:1 (no process listens there), so nothing was checked; check server.listen" in said
    assert "(on its host): kvtier fsck --offline --disk-dir DIR" in said
    assert sorted(folder.rglob("*")) == before


def test_fsck_shows_names_of_files_that_are_no_text(config: DaemonConfig) -> None:
    strange = config.disk.disk_dir / "packs" / os.fsdecode(b"\xff\x1b[31m[b]")
    with daemon(config, prompt=True) as kvtier:
        strange.touch()
        online = kvtier("fsck")
    offline = cli(config)("fsck", "--offline", "--disk-dir", config.disk.disk_dir)
    for result in (online, offline):
        assert result.exit_code == 0, result.output
        assert r"\udcff\x1b[31m[b]" in "".join(result.output.split())
        assert {character for character in result.output if not character.isprintable()} == {"\n"}


def test_fsck_offline_says_which_folder_cannot_be_looked_at(config: DaemonConfig) -> None:
    """As that of a service, 0700 and of another user: the answer was the last line of a traceback."""
    long = config.disk.disk_dir / ("x" * 300)
    result = cli(config)("fsck", "--offline", "--disk-dir", long)
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert "cannot be looked at: File name too long; run the command as the daemon's user" in said
    assert "Error:" not in said


def test_fsck_offline_does_not_call_a_strange_folder_clean(tmp_path: Path, config: DaemonConfig) -> None:
    """A mistyped --disk-dir was "clean", exit 0, and had a lock file afterwards."""
    strange = tmp_path / "strange"
    strange.mkdir()
    result = cli(config)("fsck", "--offline", "--disk-dir", strange)
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert "holds neither ledger.sqlite nor packs" in said
    assert "kvtier fsck --offline --disk-dir DIR" in said
    assert not list(strange.iterdir())
