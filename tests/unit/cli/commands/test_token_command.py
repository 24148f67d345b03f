"""`kvtier token`, and every command over TCP, against a real daemon."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvtier.cli.app import app
from tests.fakes.tcp_daemon import TcpDaemon, serving


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[TcpDaemon]:
    with serving(tmp_path) as running:
        yield running


def local(daemon: TcpDaemon, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["--socket", str(daemon.config.server.socket), *arguments], env={"COLUMNS": "100"})


def remote(daemon: TcpDaemon, token: str, *arguments: str) -> Result:
    assert daemon.authority is not None
    given = ["--server", daemon.address, "--ca-file", str(daemon.authority.ca_file)]
    return CliRunner().invoke(app, [*given, *arguments], env={"KVTIER_TOKEN": token, "COLUMNS": "100"})


def test_a_grant_from_its_making_to_its_end(daemon: TcpDaemon, tmp_path: Path) -> None:
    made = local(daemon, "token", "create", "team-a", "--role", "operator", "--owner", "a", "--ttl", "30d")
    assert made.exit_code == 0
    token = made.stdout.strip()
    assert token.startswith("kvt_"), "stdout has the token only"
    assert "team-a is operator, owner a, until" in made.stderr
    shown = local(daemon, "token", "list").stdout
    assert "team-a" in shown
    assert "operator" in shown
    assert token not in shown
    daemon.local.pin("p", tokens=range(80), model="m", owner="a")
    assert "p    waiting" in remote(daemon, token, "list").stdout
    assert remote(daemon, token, "unpin", "p").exit_code == 0
    file = tmp_path / "token"
    file.write_text(token + "\n")
    given = ["--server", daemon.address, "--ca-file", str(tmp_path / "authority.pem"), "--token-file", str(file)]
    assert CliRunner().invoke(app, [*given, "status"]).exit_code == 0
    refused = remote(daemon, token, "token", "list")
    assert refused.exit_code == 1
    assert "needs the role admin" in refused.stderr
    assert local(daemon, "token", "revoke", "team-a").stdout == "revoked: team-a (operator)\n"
    assert remote(daemon, token, "list").exit_code == 1
    assert "no grants" in local(daemon, "token", "list").stdout


def test_json(daemon: TcpDaemon) -> None:
    made = json.loads(local(daemon, "token", "create", "x", "--role", "viewer", "--json").stdout)
    assert made["token"].startswith("kvt_")
    assert made["grant"]["role"] == "viewer"
    (listed,) = json.loads(local(daemon, "token", "list", "--json").stdout)
    assert listed == made["grant"]
    assert json.loads(local(daemon, "token", "revoke", "x", "--json").stdout) == listed


def test_a_certificate_has_no_token(daemon: TcpDaemon) -> None:
    made = local(daemon, "token", "create", "x", "--role", "viewer", "--certificate", "host-1")
    assert made.stdout == "granted: x is viewer, for the client certificate host-1\n"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["create"], "name the grant"),
        (["create", "x"], "--role viewer, operator or admin"),
        (["list", "x"], "give no name"),
        (["revoke", "x", "--role", "viewer"], "is for `kvtier token create`"),
        (["create", "x", "--role", "viewer", "--ttl", "long"], "must be a duration"),
        (["create", "a b", "--role", "viewer"], "use 1 to 128 letters"),
        (["create", "x", "--role", "admin", "--owner", "a"], "an admin has no owner"),
    ],
)
def test_mistakes(daemon: TcpDaemon, arguments: list[str], problem: str) -> None:
    refused = local(daemon, "token", *arguments)
    assert refused.exit_code == 2
    assert problem in " ".join(refused.stderr.replace("\u2502", " ").split())


@pytest.mark.parametrize("option", ["--owner", "--ttl", "--certificate"])
def test_an_empty_limit_is_not_left_out(daemon: TcpDaemon, option: str) -> None:
    """`--owner "$TEAM"`, with the variable unset, made a token for the prompts of all owners."""
    refused = local(daemon, "token", "create", "x", "--role", "operator", option, "")
    assert refused.exit_code == 2
    assert f"{option}: is empty" in " ".join(refused.stderr.replace("\u2502", " ").split())
    assert "no grants" in local(daemon, "token", "list").stdout


def test_commands_that_look_at_this_machine(daemon: TcpDaemon) -> None:
    refused = remote(daemon, "x", "doctor")
    assert refused.exit_code == 2
    assert "run it there" in refused.stderr
    both = CliRunner().invoke(app, ["--socket", "/x", "--server", "x:1", "list"])
    assert both.exit_code == 2


@pytest.mark.parametrize("option", ["--token-file", "--ca-file", "--client-cert-file", "--client-key-file"])
def test_credentials_without_a_server_go_nowhere(daemon: TcpDaemon, option: str) -> None:
    """They were ignored, and the command meant for another host ran on the daemon of this one."""
    refused = local(daemon, option, "x", "evict", "--all")
    assert refused.exit_code == 2
    assert f"{option} = '<withheld>': is for a daemon over TCP; give --server, too" in " ".join(refused.stderr.split())
    environment = {"KVTIER_TOKEN_FILE": "x", "KVTIER_CA_FILE": "x"}
    given = ["--socket", str(daemon.config.server.socket), "list"]
    assert CliRunner().invoke(app, given, env=environment).exit_code == 0, (
        "those of the environment are for KVTIER_SERVER"
    )


def test_a_token_of_the_environment_is_the_library_s(
    daemon: TcpDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command took the file, the library the token itself."""
    assert daemon.authority is not None
    token = local(daemon, "token", "create", "x", "--role", "viewer").stdout.strip()
    (tmp_path / "old").write_text("kvt_old")
    monkeypatch.setenv("KVTIER_TOKEN_FILE", str(tmp_path / "old"))
    monkeypatch.setenv("KVTIER_TOKEN", token)
    given = ["--server", daemon.address, "--ca-file", str(daemon.authority.ca_file)]
    assert CliRunner().invoke(app, [*given, "list"]).exit_code == 0
    monkeypatch.delenv("KVTIER_TOKEN")
    (tmp_path / "old").write_text("two words")
    assert "--token-file" in CliRunner().invoke(app, [*given, "list"]).stderr


def test_a_client_certificate_may_come_from_the_environment(tmp_path: Path) -> None:
    with serving(tmp_path, client_ca=True) as daemon:
        assert daemon.authority is not None
        daemon.local.create_grant("by-name", role="viewer", certificate="team")
        cert_file, key_file = daemon.authority.issue("team")
        server = {"KVTIER_SERVER": daemon.address, "KVTIER_CA_FILE": str(daemon.authority.ca_file)}
        refused = CliRunner().invoke(app, ["list"], env=server)
        assert refused.exit_code == 3
        assert "--client-cert-file" in refused.stderr
        files = {"KVTIER_CLIENT_CERT_FILE": str(cert_file), "KVTIER_CLIENT_KEY_FILE": str(key_file)}
        done = CliRunner().invoke(app, ["list"], env=server | files)
        assert done.exit_code == 0, done.stderr
        refused = CliRunner().invoke(app, ["unpin", "x"], env=server | files)
        assert "by-name" in refused.stderr, "that it is a viewer's"


def test_no_server_answers(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["--server", "127.0.0.1:1", "list"])
    assert done.exit_code == 3
    assert "no process listens" in done.stderr
    assert "--server" in CliRunner().invoke(app, ["--server", "nonsense", "list"]).stderr
    missing = ["--server", "x:1", "--token-file", str(tmp_path / "n"), "list"]
    assert "--token-file" in CliRunner().invoke(app, missing).stderr
