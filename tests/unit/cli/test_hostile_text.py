"""Text that others wrote, shown by every command.

A model named `[/red]` ended `list` and `status` with a traceback for every user, and escape sequences of models,
recipes, errors and vLLM's answers reached the terminal.
"""

import ast
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer.main

from kvtier._pb.cache_pb2 import PromptStatus
from kvtier.cli.app import app
from kvtier.doctor import all_checks
from kvtier.doctor.engine_environment import EngineEnvironment
from tests.unit.cli import fake_vllm, hostile
from tests.unit.cli.conftest import Kvtier
from tests.unit.cli.hostile import HOSTILE, HostileDaemon, HostileVllm

CLI = Path(__file__).parents[3] / "kvtier" / "cli"
_RICH = re.compile(r"\x1b\[(?:[0-9;]*m|\?25[hl])")  # its colours, and the cursor hidden while a bar is drawn
SILENT = ("set", "unpin", "evict", "export", "export-config")
WITHOUT_JSON = ("export-config",)
COMMANDS = {
    "list": [],
    "show": ["x"],
    "set": ["x", "--priority", "1"],
    "rename": ["x", "y"],
    "apply": ["-f", "prompts.yaml", "--url", "URL", "--timeout", "1"],
    "export-config": [],
    "history": ["x"],
    "rollback": ["x", "@1"],
    "unpin": ["x"],
    "evict": ["x"],
    "explain": ["--recent"],
    "advise": [],
    "status": [],
    "top": ["--once"],
    "watch": [],
    "ready": [],
    "remote": [],
    "verify": ["x", "--url", "URL"],
    "quarantine": ["x", "--reason", "y"],
    "warm": ["--url", "URL", "--all"],
    "pin": ["x", "--system", "s.txt", "--url", "URL", "--timeout", "1"],
    "export": ["x", "bundle", "--force"],
    "import": ["bundle"],
    "fsck": [],
    "token": ["list"],
    "doctor": ["--url", "URL"],
    "trace": ["."],
}


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hostile files, and wide lines, so that what is folded into a table's cell does not begin one."""
    for table in ("CONFIG", "STATE"):
        monkeypatch.setenv(f"XDG_{table}_HOME", str(tmp_path / table.lower()))
    (tmp_path / "s.txt").write_text("You are a parrot. " * 20)
    (tmp_path / "bundle").write_bytes(b"any")
    (tmp_path / "prompts.yaml").write_text("prompts: [{name: x, system_file: s.txt}, {name: new, text: Hello parrots}]")
    event = {"name": HOSTILE, "cat": HOSTILE, "ph": "X", "ts": 1.0, "dur": 1.0, "pid": HOSTILE}
    name = {"name": "process_name", "ph": "M", "pid": HOSTILE, "args": {"name": HOSTILE}}
    (tmp_path / "one.trace.json").write_text(f"[\n{json.dumps(event)},\n{json.dumps(name)},\n")
    environment = EngineEnvironment(vllm=HOSTILE, series=("0.1", "0.2"), hashes=(HOSTILE,), problem=HOSTILE)
    monkeypatch.setattr(all_checks, "probe_environment", lambda python: environment)


@pytest.fixture
def daemon(tmp_path: Path, kvtier: Kvtier, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostileDaemon]:
    monkeypatch.setenv("COLUMNS", "3000")  # after `kvtier`, which has its own
    with hostile.serving(HostileDaemon(), tmp_path / "s") as fake:
        yield fake


@pytest.fixture
def vllm() -> Iterator[HostileVllm]:
    fake = HostileVllm()
    with fake_vllm.serving(fake):
        yield fake


Run = Callable[..., str]


@pytest.fixture
def shown(kvtier: Kvtier, vllm: HostileVllm) -> Run:
    """Run a command and check all it wrote; returns that."""

    def run(command: str, *more: str) -> str:
        arguments = [vllm.url if each == "URL" else each for each in COMMANDS[command]]
        result = kvtier(command, *arguments, *more)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
        assert_harmless(_RICH.sub("", result.output) if "FORCE_COLOR" in os.environ else result.output)
        if "--json" in more and result.stdout:
            json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        return result.output

    return run


def assert_harmless(text: str) -> None:
    """Check that every character takes a place on the screen, and that no line was written by others."""
    strange = {character for character in text if not character.isprintable()} - {"\n"}
    assert not strange, f"{strange} in {text!r}"
    assert not [line for line in text.splitlines() if line.lstrip(" ").startswith("INJECTED")], text


def test_every_command_is_walked() -> None:
    group = typer.main.get_command(app)
    assert set(COMMANDS) == set(group.commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("as_json", [(), ("--json",)])
@pytest.mark.parametrize("command", COMMANDS)
def test_answers(command: str, as_json: tuple[str, ...], daemon: HostileDaemon, shown: Run) -> None:
    if command in WITHOUT_JSON and as_json:
        return
    text = shown(command, *as_json)
    assert "evil" in text or command in SILENT, "these show no text of the daemon's"
    assert HOSTILE not in text


@pytest.mark.parametrize("command", COMMANDS)
def test_on_a_terminal_with_colours(
    command: str, daemon: HostileDaemon, shown: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_INTERACTIVE", "0")  # no bar, whose cursor movements are rich's own
    shown(command)


@pytest.mark.parametrize("kind", ["", "InvalidArgumentError", HOSTILE.encode("ascii", "ignore").decode()[:4]])
@pytest.mark.parametrize("command", COMMANDS)
def test_refusals_of_the_daemon(command: str, kind: str, daemon: HostileDaemon, shown: Run) -> None:
    daemon.refusal, daemon.error_kind = HOSTILE, kind
    shown(command)


@pytest.mark.parametrize("status", [400, 401, 404, 500])
@pytest.mark.parametrize("command", [name for name, arguments in COMMANDS.items() if "URL" in arguments])
def test_refusals_of_vllm(command: str, status: int, daemon: HostileDaemon, vllm: HostileVllm, shown: Run) -> None:
    vllm.status = status
    assert "evil" in shown(command)


@pytest.mark.parametrize("state", [*PromptStatus.State.values(), 99])
@pytest.mark.parametrize("command", ["list", "show", "set", "unpin", "pin", "warm", "doctor"])
def test_states_also_of_a_newer_daemon(command: str, state: int, daemon: HostileDaemon, shown: Run) -> None:
    daemon.overrides = {"state": state, "error": "", "recipe_json": hostile.recipe(HOSTILE)}
    shown(command)
    shown(command, "--json")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf"), 1e300, -1e300, 1e18])
@pytest.mark.parametrize("command", [
    "list", "show", "advise", "status", "pin", "import", "doctor", "top", "watch", "verify", "quarantine",
])  # fmt: skip
def test_numbers_that_are_no_moment(command: str, number: float, daemon: HostileDaemon, shown: Run) -> None:
    daemon.number = number
    shown(command)
    shown(command, "--json")


def test_the_arguments_are_not_obeyed_either(daemon: HostileDaemon, kvtier: Kvtier) -> None:
    for arguments in ([HOSTILE], ["list", HOSTILE], ["list", f"--{HOSTILE}"], ["evict", "x", "--tier", HOSTILE]):
        result = kvtier(*arguments)
        assert result.exit_code == 2
        assert_harmless(result.output)


def test_json_keeps_what_was_said(daemon: HostileDaemon, kvtier: Kvtier) -> None:
    """What is escaped for the eyes is exact for programs, and what is harmless is not escaped."""
    daemon.text = HOSTILE + "größer 東京"
    output = kvtier("show", "x", "--json").stdout
    assert json.loads(output)["model"] == daemon.text
    assert "größer 東京" in output


def test_names_are_offered_to_the_shell_only_when_they_are_names(
    daemon: HostileDaemon, tmp_path: Path, kvtier: Kvtier
) -> None:
    """Some shells evaluate what a completion prints."""
    from kvtier.cli.options import complete_prompt_name

    with typer.main.get_command(app).make_context("kvtier", ["--socket", str(tmp_path / "s"), "show", "x"]) as context:
        assert complete_prompt_name(context, "") == []  # type: ignore[arg-type]
        daemon.text = "team/bot-1.2@x"
        assert complete_prompt_name(context, "") == ["team/bot-1.2@x"]  # type: ignore[arg-type]


def imports_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    plain = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return plain | {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


def test_only_what_escapes_draws() -> None:
    """rich gets text from `streams` and `grid` alone, which escape it, and from bars, whose words are constants."""
    drawing = {path for path in CLI.parent.rglob("*.py") if any(name.startswith("rich") for name in imports_of(path))}
    assert drawing == {CLI / "output" / name for name in ("streams.py", "grid.py", "progress.py", "live_screen.py")}


@pytest.mark.parametrize("path", sorted(CLI.rglob("*.py")), ids=lambda path: str(path.relative_to(CLI)))
def test_markup_is_off_and_what_bars_say_is_constant(path: Path) -> None:
    for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        if name in ("Console", "TextColumn"):
            off = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert off.get("markup") == "False", f"{path.name}:{call.lineno}"
        if name.endswith("add_task"):
            assert isinstance(call.args[0], ast.Constant), f"{path.name}:{call.lineno}"
        is_plain = name in ("print", "typer.echo", "sys.stdout.write")
        assert not is_plain or path.name in ("streams.py", "app.py"), f"{path.name}:{call.lineno}"
