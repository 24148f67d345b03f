"""Whatever a command line, a file, the settings, vLLM or a trace says: an answer or one clear error, and no traceback.

The command lines are made from the commands themselves, so that a new option is tried by being there.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.models import ArgumentInfo, OptionInfo
from typer.testing import CliRunner, Result

from kvtier._pb.cache_pb2 import PinRequest, PromptStatus
from kvtier.cli import source_files as sources
from kvtier.cli.app import app
from kvtier.cli.commands.trace_files import read_trace, summarize
from kvtier.cli.options import checked_given, checked_number, checked_text
from kvtier.config.load import LoadedConfig, load_config
from kvtier.config.settings import KEYS, variable_of
from kvtier.daemon.main import app as daemon_app
from kvtier.daemon.main import render_config
from kvtier.doctor import all_checks
from kvtier.doctor.engine_environment import EngineEnvironment
from kvtier.errors import ConfigError, ConfigErrors, InvalidArgumentError, KvtierError, RenderError
from kvtier.library.rendering.recipe import Recipe, SourceKind
from kvtier.library.rendering.vllm_client import VllmClient
from tests.fakes import fake_cache_service
from tests.fakes.fake_cache_service import FakeCacheService
from tests.unit.cli import fake_vllm
from tests.unit.cli.fake_vllm import FakeVllm

DIGITS = "9" * 400
DEEP = "[" * 100_000
CASES = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=30)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT, inner, max_size=4),
    max_leaves=10,
)
URLS = [
    "http://[::1", "http://256.256.256.256", "http://127.0.0.1:99999", "http://127.0.0.1:x", "http://", "127.0.0.1", "",
    "http://" + "a" * 64 + ".invalid", "http://a..invalid", "http://127.0.0.1:9\x1b", "http://\udcff", "http://ü:ü",
    "http://127.0.0.1:9/?a=b", "http://127.0.0.1:9#x", "ftp://127.0.0.1", "http://" + "9" * 70_000, "http://[v1.x]",
]  # fmt: skip
NUMBERS = ["nan", "inf", "-inf", "1e300", "-1", DIGITS, "9" * 5000, "0", "1", "", "x", "٣", "\udcff", "1_0", "0x10"]
TEXTS = ["", "x", "\udcff", "\x1b[31m[/red]", "a" * 100_000, DIGITS, "-", "~nouser/x", "ü", "\n"]
PATHS = [
    "",
    ".",
    "s.txt",
    "nope",
    "~nouser/x",
    "a" * 300,
    "\udcff",
    "/",
    "/dev/null/x",
    "deep.json",
    "ids.json",
    "folder",
]


def is_calm(result: Result, codes: tuple[int, ...] = (0, 1, 2, 3)) -> bool:
    """Check that the command ended by itself and in printable text; True when it did what it was asked for."""
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise AssertionError(result.output) from result.exception
    assert "Traceback" not in result.output
    assert {character for character in result.output if not character.isprintable()} <= {"\n"}, result.output
    assert result.exit_code in codes, result.output
    assert len(result.output) < 40_000, "values are shortened"
    return result.exit_code == 0


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings of this machine's; some files."""
    for name in [*filter(lambda name: name.startswith("KVTIER_"), os.environ), "VLLM_API_KEY", "OPENAI_API_KEY"]:
        monkeypatch.delenv(name, raising=False)
    for table in ("CONFIG", "STATE"):
        monkeypatch.setenv(f"XDG_{table}_HOME", str(tmp_path / table.lower()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(all_checks, "probe_environment", lambda python: EngineEnvironment())
    (tmp_path / "s.txt").write_text("You are a parrot. " * 5)
    (tmp_path / "deep.json").write_text(DEEP)
    (tmp_path / "ids.json").write_text("[1, 2, 3]")
    (tmp_path / "folder").mkdir()


@pytest.fixture
def kvtier(tmp_path: Path) -> Iterator[Callable[..., Result]]:
    """Run the CLI beside a daemon that has a prompt `x`, and a vLLM (the word VLLM in an argument)."""
    with fake_cache_service.serving(FakeCacheService(), tmp_path / "s"), fake_vllm.serving(FakeVllm()) as vllm:

        def run(*arguments: str) -> Result:
            said = [vllm.url if each == "VLLM" else each for each in arguments]
            # A real command line has no NUL; Click's parser takes "" for the program's own arguments.
            return CliRunner().invoke(app, ["--socket", str(tmp_path / "s"), *said], env={"COLUMNS": "200"})

        assert run("pin", "x", "--tokens", "ids.json", "--url", "VLLM", "--no-warm").exit_code == 0
        yield run


def refused(result: Result, *says: str) -> None:
    """Check for wrong usage that names all of this."""
    assert not is_calm(result, codes=(1, 2))
    said = " ".join(result.output.replace("│", " ").split())
    for each in says:
        assert each in said, said


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("command", [("pin", "y", "--system", "s.txt"), ("warm",), ("doctor",)])
def test_urls(command: tuple[str, ...], url: str, kvtier: Callable[..., Result]) -> None:
    if command != ("doctor",) or url:
        refused(kvtier(*command, "--url", url), "--url", "http://127.0.0.1:8000")


@pytest.mark.parametrize(
    "url", ["http://me:hunter2@127.0.0.1:9", "http://me:hunter2@[::1", "me:hunter2@h", "http://me:hun/hunter2@x:y"]
)
@pytest.mark.parametrize("command", [("pin", "y", "--system", "s.txt"), ("warm",), ("doctor",), ("doctor", "--json")])
def test_a_password_in_the_url_is_not_shown(command: tuple[str, ...], url: str, kvtier: Callable[..., Result]) -> None:
    result = kvtier(*command, "--url", url)
    assert not is_calm(result)
    assert "***@" in result.output
    assert "hunter2" not in result.output


def test_a_password_in_the_url_is_used_all_the_same(kvtier: Callable[..., Result]) -> None:
    seen = []

    class Asked(FakeVllm):
        def answer(self, path: str, body: dict[str, Any], authorization: str) -> tuple[int, dict[str, Any] | str]:
            seen.append(authorization)
            return super().answer(path, body, authorization)

    with fake_vllm.serving(Asked()) as vllm:
        url = vllm.url.replace("//", "//me:hunter2@")
        result = kvtier("pin", "y", "--system", "s.txt", "--no-warm", "--url", url)
    assert "***@127.0.0.1" in result.output
    assert set(seen) == {"Basic bWU6aHVudGVyMg=="}


@pytest.mark.parametrize("key", ["sk\n", "schlüssel", "\udcff", "a b\x1b"])
def test_an_api_key_that_no_header_can_hold_is_refused_and_not_shown(key: str, kvtier: Callable[..., Result]) -> None:
    result = kvtier("warm", "--url", "VLLM", "--api-key", key)
    refused(result, "--api-key")
    assert "schl" not in result.output


@pytest.mark.parametrize("ttl", [DIGITS + "d", "9" * 5000 + "s", "1e9d", "36501d", "٣d", "\udcff", "1.5", "inf", "-1s"])
def test_ttls(ttl: str, kvtier: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "bundle").touch()
    refused(kvtier("pin", "y", "--tokens", "ids.json", "--url", "VLLM", "--ttl", ttl), "--ttl", "90s")
    refused(kvtier("import", "bundle", "--ttl", ttl), "--ttl", "90s")


@pytest.mark.parametrize("number", ["nan", "inf", "1e300", DIGITS])
@pytest.mark.parametrize(
    "option", [("pin", "x", "--timeout"), ("warm", "--timeout"), ("warm", "--wait"), ("warm", "--max-ratio")]
)
def test_numbers(option: tuple[str, ...], number: str, kvtier: Callable[..., Result]) -> None:
    refused(kvtier(*option, number, "--url", "VLLM"), option[-1])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (DEEP, "100 lists and objects"),
        ('{"a":' * 2000 + "1" + "}" * 2000, "100 lists and objects"),
        ("[" * 101 + "]" * 101, "100 lists and objects"),
        ("[" + "9" * 5000 + "]", "thousands of digits"),
        ('[{"role": "system", "content": "a \\ud800 b"}]', "\\ud800, a lone surrogate) at [0].content"),
        ('[{"role": "system", "content": "x", "\\udfff": 1}]', "a lone surrogate"),
        ("[NaN]", "NaN"),
        ("[1e999]", "1e999"),
        ("{", "is not valid JSON"),
        ("5", "it must hold a JSON list"),
        ('{"messages": [{"role": "system", "content": "x"}], "tools": 5}', "tools"),
        ('{"messages": [{"role": "system", "content": "x"}], "tools": [5]}', "tools[0]"),
        ('[{"role": {}, "content": "x"}]', "[0].role"),
    ],
    ids=lambda each: str(each)[:20],
)  # fmt: skip
def test_json(text: str, says: str, kvtier: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(text)
    refused(kvtier("pin", "y", "--messages", "m.json", "--url", "VLLM"), "--messages", says)
    refused(kvtier("pin", "y", "--tokens", "m.json", "--url", "VLLM"), "--tokens")
    if not text.startswith("[{"):  # else it may be tools
        refused(kvtier("pin", "y", "--system", "s.txt", "--tools", "m.json", "--url", "VLLM"), "--tools")
    if not text.startswith('{"m'):  # else they may be kwargs
        refused(kvtier("pin", "y", "--system", "s.txt", "--chat-template-kwargs", text), "--chat-template-kwargs")


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "\udcff"),
        ("unpin", "\udcff"),
        ("evict", "\udcff"),
        ("warm", "\udcff"),
        ("export", "\udcff", "y"),
        ("export", "x", "y", "--namespace", "\udcff"),
        ("import", "s.txt", "--name", "\udcff"),
        ("pin", "\udcff", "--tokens", "ids.json", "--url", "VLLM"),
        ("pin", "y", "--tokens", "ids.json", "--url", "VLLM", "--cache-salt", "\udcff"),
        ("pin", "y", "--tokens", "ids.json", "--url", "VLLM", "--model", "\udcff"),
    ],
)
def test_arguments_that_are_no_text(arguments: tuple[str, ...], kvtier: Callable[..., Result]) -> None:
    refused(kvtier(*arguments), "\\udcff", "UTF-8")


def test_a_socket_in_the_home_of_a_user_that_there_is_not() -> None:
    refused(CliRunner().invoke(app, ["--socket", "~nouser/x", "list"]), "--socket", "~nouser")


class Parameter(NamedTuple):
    """An option or argument of a command, as its function declares it."""

    name: str
    kind: Any
    spelling: str
    is_option: bool
    is_checked: bool


def parameters_of(command: Callable[..., None]) -> list[Parameter]:
    parameters = []
    for name, hint in get_type_hints(command, include_extras=True).items():
        info = next((each for each in get_args(hint) if isinstance(each, OptionInfo | ArgumentInfo)), None)
        if info is None:  # the context, and what is returned
            continue
        kind, spelled = get_args(hint)[0], next(iter(info.param_decls or ()), f"--{name.replace('_', '-')}")
        kinds = [each for each in (*get_args(kind), kind) if each is not type(None)]
        checked = info.callback in (checked_text, checked_given, checked_number)
        parameters.append(Parameter(name, kinds[0], spelled, isinstance(info, OptionInfo), checked))
    return parameters


COMMANDS = {
    command.name or getattr(command.callback, "__name__", ""): parameters_of(command.callback)
    for command in app.registered_commands
    if command.callback
}
ENDLESS = {"watch": ["--timeout", "0.1"], "top": ["--once"]}
"""What ends those that run until Ctrl-C; the last of an option counts."""
FILES = ("system", "messages", "text", "tokens", "tools")
READ_BY_US = {*FILES, "budget", "chat_template_kwargs", "ttl", "url", "api_key"}


def test_every_text_and_number_is_checked() -> None:
    """Or a name that is no UTF-8, and nan, end in a traceback; the others have a check of their own, tested above."""
    assert len(COMMANDS) == len(app.registered_commands) == 27
    for name, parameters in COMMANDS.items():
        needs = [each for each in parameters if each.kind in (str, float) and each.name not in READ_BY_US]
        assert not [each.name for each in needs if not each.is_checked], name


def values_of(parameter: Parameter) -> st.SearchStrategy[str]:
    if parameter.name == "url":
        return st.sampled_from([*URLS, "VLLM"])
    if parameter.kind in (int, float):
        return st.sampled_from(NUMBERS)
    return st.sampled_from(PATHS if parameter.kind is Path or parameter.name in FILES else TEXTS)


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A command with some of its options, and arguments of which some are good."""
    name = draw(st.sampled_from(sorted(COMMANDS)))
    line, parameters = [name], COMMANDS[name]
    for parameter in parameters:
        if parameter.name == "offline":  # a process for each
            continue
        if not parameter.is_option:
            line += draw(st.lists(st.just("x") | values_of(parameter), max_size=2))
        elif draw(st.booleans()):
            line += [parameter.spelling, *([] if parameter.kind is bool else [draw(values_of(parameter))])]
    line += ENDLESS.get(name, [])
    takes_url = any(parameter.name == "url" for parameter in parameters)
    return [*line, "--url", "VLLM"] if takes_url and "--url" not in line else line


@CASES
@given(line=command_lines())
def test_command_lines(line: list[str], kvtier: Callable[..., Result]) -> None:
    is_calm(kvtier(*line))


@CASES
@given(text=st.binary(max_size=40) | ANY_JSON.map(lambda value: json.dumps(value).encode()))
@pytest.mark.parametrize("read", [
    lambda path: sources.read_messages(path, None),
    lambda path: Recipe(kind=SourceKind.SYSTEM, content="x", tools=sources.read_tools(path)),
    lambda path: sources.read_system(path, None),
    lambda path: sources.read_tokens(path),
])  # fmt: skip
def test_what_is_read_can_be_sent(read: Callable[[str], Any], text: bytes, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(text)
    read_value: Any = None
    with suppress(InvalidArgumentError):
        read_value = read(str(tmp_path / "source"))
    if isinstance(read_value, Recipe):
        stored = PinRequest(recipe_json=read_value.to_json()).recipe_json
        assert Recipe.from_json(stored) == read_value
        httpx.Request("POST", "http://x", json={"messages": read_value.messages(), "tools": read_value.tools})
    else:
        PinRequest(tokens=read_value or [])


RECIPES = st.fixed_dictionaries({
    "version": st.just(1) | ANY_JSON, "kind": st.sampled_from(["system", "messages", "text", "tokens"]) | ANY_JSON,
}, optional={
    "content": st.lists(st.just({"role": "user", "content": "x"}) | ANY_JSON) | ANY_JSON,
    "tools": st.lists(st.just({"type": "function"})) | ANY_JSON, "chat_template_kwargs": ANY_JSON,
})  # fmt: skip


@CASES
@given(text=ANY_TEXT | ANY_JSON.map(json.dumps) | RECIPES.map(json.dumps))
def test_stored_recipes_of_others(text: str) -> None:
    """The daemon keeps them as they came; another client may have sent anything."""
    with suppress(RenderError):
        recipe = Recipe.from_json(text)
        if recipe.kind in ("system", "messages"):
            assert all(isinstance(message, dict) for message in recipe.messages())
            assert recipe.messages()
        PinRequest(recipe_json=recipe.to_json())
        list(recipe.tools or [])


def asked(client: VllmClient) -> list[Callable[[], object]]:
    return [
        client.models, client.version, client.cache_config, client.cache_capacity, client.num_waiting,
        lambda: PinRequest(tokens=client.tokenize_text("m", "x")),
        lambda: PinRequest(tokens=client.tokenize_chat("m", [], None)),
        lambda: client.detokenize("m", [1]),
        lambda: client.warm("m", [1], "", 1.0),
        lambda: [PinRequest(model=model.base, lora_name=model.lora_name) for model in client.models()],
    ]  # fmt: skip


ENTRIES = st.fixed_dictionaries({"id": ANY_TEXT | ANY_JSON}, optional={"parent": ANY_JSON, "root": ANY_JSON})
ANSWERS = st.fixed_dictionaries({}, optional={
    "data": st.lists(ENTRIES, max_size=3) | ANY_JSON, "tokens": st.lists(st.integers() | ANY_JSON) | ANY_JSON,
    "error": ANY_JSON, "usage": ANY_JSON, "version": ANY_JSON, "prompt": ANY_JSON,
})  # fmt: skip
METRICS = st.sampled_from(["²", "9" * 5000, "nan", "inf", "x", "-1", "1", ""]).map(
    lambda value: (
        f'vllm:num_requests_waiting{{a="b"}} {value}\n'
        f'vllm:cache_config_info{{block_size="{value}",num_gpu_blocks="{value}"}} 1'
    )
)


@CASES
@given(
    body=st.binary(max_size=40)
    | (ANSWERS | ANY_JSON).map(lambda value: json.dumps(value).encode())
    | METRICS.map(str.encode),
    status=st.sampled_from([200, 200, 200, 302, 400, 401, 404, 500]),
    headers=st.sampled_from([{}, {"content-type": "text/html; charset=hex"}, {"content-encoding": "gzip"}]),
)
def test_any_answer_of_vllm(body: bytes, status: int, headers: Mapping[str, str]) -> None:
    client = VllmClient("http://127.0.0.1:9")
    raw = lambda request: httpx.Response(status, headers=headers, stream=httpx.ByteStream(body))  # noqa: E731
    client._http = httpx.Client(base_url="http://127.0.0.1:9", transport=httpx.MockTransport(raw))
    for ask in asked(client):
        with suppress(KvtierError):
            ask()


EVENTS = st.fixed_dictionaries({}, optional={
    "ph": st.sampled_from("XbeM") | ANY_JSON, "name": st.just("process_name") | ANY_JSON, "pid": ANY_JSON,
    "id": st.none() | ANY_JSON,
    "ts": st.floats() | ANY_JSON, "dur": st.floats() | ANY_JSON, "args": st.just({"name": 5}) | ANY_JSON,
})  # fmt: skip


@CASES
@given(lines=st.lists(EVENTS.map(json.dumps) | ANY_JSON.map(json.dumps) | ANY_TEXT, max_size=5))
def test_any_trace(lines: list[str], tmp_path: Path) -> None:
    path = tmp_path / "any.trace.json"
    path.write_text("\n".join([*lines, DEEP, "9" * 5000]), encoding="utf-8", errors="surrogatepass")
    json.dumps(summarize(list(read_trace(path))), allow_nan=False)


# The daemon's settings.

HUGE = [DIGITS, "9" * 5000, f"0x{'f' * 20_000}", "1e999", "nan", "-inf", "9223372036854775808", "18446744073709551616"]
STRINGS = [
    DIGITS, DIGITS + "GiB", DIGITS + "%", "500%", "101%", "²GiB", "~nouser/x", "a\0b", "", "x" * 5000, "/" + "x" * 300,
    "\x1b[31m", "a" * 70 + ":1", "ü..:1", "a..b:80", "/dev/null/x", "1GiB", "8EiB", "9000000TiB", "auto", "off",
]  # fmt: skip
OTHERS = ["true", "[]", "{}", "[[[]]]", "1979-05-27", "[" * 50 + "]" * 50, "1", "0", "-1", "0.5"]
TOML_VALUES = [*HUGE, *map(json.dumps, STRINGS), *OTHERS]


def loaded(path: Path | None = None, **given_values: Any) -> LoadedConfig | None:
    """Return the settings; None when they were refused as they shall be."""
    try:
        return load_config(path=path, **{"environ": {}, **given_values})
    except ConfigErrors as exc:
        for error in exc.errors:
            check_message(error)
        return None


def check_message(error: ConfigError) -> None:
    assert len(str(error)) < 2000, "the value is shortened"
    assert error.source in str(error)
    assert error.key[:20] in str(error) or not error.key.isprintable()


def is_whole(config: LoadedConfig | None, tmp_path: Path) -> None:
    """Check that the settings can be printed and read again, and that a machine can be checked for them."""
    if config is not None:
        again = tmp_path / "again.toml"
        again.write_text(render_config(config), encoding="utf-8")
        assert load_config(path=again, environ={}).config == config.config


@CASES
@given(
    text=st.binary(max_size=60)
    | st.text(st.sampled_from('[]{}="\\\n#.a0_diskhost\x1b\x00é'), max_size=60).map(str.encode)
)
def test_any_text_for_settings(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "k.toml"
    path.write_bytes(text)
    is_whole(loaded(path), tmp_path)


@pytest.mark.parametrize("value", TOML_VALUES, ids=lambda value: value[:12])
@pytest.mark.parametrize("key", KEYS)
def test_each_setting_with_values_of_every_kind(key: str, value: str, tmp_path: Path) -> None:
    path, (table, name) = tmp_path / "k.toml", key.split(".")
    path.write_text(f"[{table}]\n{name} = {value}\n")
    is_whole(loaded(path), tmp_path)
    written = value.strip('"').replace("\0", "")
    is_whole(loaded(flags={key: written}), tmp_path)
    is_whole(loaded(environ={variable_of(key): written}), tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a = " + "[" * 100_000, "too deep"),
        ("a = " + "{b = " * 20_000, "too deep"),
        ("[disk]\nx." + "a." * 3_000 + "b = 1", "disk.x"),
        ("[" + "a." * 3_000 + "b]", "no such table"),
        ("[disk]\nbytes = " + "9" * 5000, "digits"),
        ("[disk]\nbytes = 0x" + "f" * 20_000, "disk.bytes"),
        ("#" * 2_000_000, "more than"),
        ('"\x1b[31m" = 1', "TOML"),
        ('"\\u001b[31m" = 1', "no such setting"),
        ("x" * 500_000 + " = 1", "no such setting"),
    ],
    ids=lambda each: each[:12],
)  # fmt: skip
def test_the_daemon_says_what_is_wrong_with_its_file(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "k.toml"
    path.write_text(text)
    refused(CliRunner().invoke(daemon_app, ["--check-config", "--config", str(path)]), str(path), says)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--disk-dir", "~nouser/x"),
        ("--arena-dir", "~nouser/x"),
        ("--socket", "~nouser/x"),
        ("--disk-dir", ""),
        ("--disk-dir", "a\0b"),
        ("--host-bytes", DIGITS),
        ("--disk-bytes", DIGITS + "GiB"),
        ("--disk-bytes", DIGITS + "%"),
        ("--disk-bytes", "101%"),
        ("--log-level", "\x1b[31m"),
    ],
    ids=lambda each: each[:20],
)
def test_options_of_the_daemon(option: str, value: str) -> None:
    refused(CliRunner().invoke(daemon_app, ["--check-config", option, value]))


def test_a_folder_with_a_name_too_long_for_the_file_system(tmp_path: Path) -> None:
    arguments = ["--check-config", "--disk-dir", f"/tmp/{'x' * 300}", "--http-listen", "off"]
    is_calm(CliRunner().invoke(daemon_app, arguments))


def run_process(program: str, arguments: list[str], surroundings: str, **environment: str) -> tuple[int, str]:
    """Run an entry point where the shell has done something before; return status and what stderr got."""
    start = f"import sys; sys.argv[1:] = {arguments!r}; from {program} import main; main()"
    done = subprocess.run(
        ["sh", "-c", surroundings, sys.executable, "-c", start],
        stderr=subprocess.PIPE, text=True, check=False, timeout=60, env={**os.environ, **environment},
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize("program", ["kvtier.cli.app", "kvtier.daemon.main"])
def test_too_few_open_files(program: str) -> None:
    """gRPC ended the process, or a module could not be imported."""
    status, said = run_process(program, ["--help"], 'ulimit -n 12; exec "$0" "$@"')
    assert status == 1
    assert "ulimit -n = 12: kvtier needs at least 64 open files to start; raise it: ulimit -n 1024" in said


@pytest.mark.parametrize("answer", [[], ["--json"]])
@pytest.mark.parametrize("model", ["/a/model/that/is/much/longer/than/the/column/ü", "short"])
def test_a_stdout_that_is_full_closed_or_ascii(answer: list[str], model: str, tmp_path: Path) -> None:
    fake = FakeCacheService()
    with fake_cache_service.serving(fake, tmp_path / "s"):
        fake.prompts["p"] = PromptStatus(name="p", model=model)
        line = ["--socket", str(tmp_path / "s"), "list", *answer]
        status, said = run_process("kvtier.cli.app", line, 'exec "$0" "$@" >/dev/full')
        assert (status, "cannot be written to stdout: No space left" in " ".join(said.split())) == (1, True)
        assert run_process("kvtier.cli.app", line, 'exec "$0" "$@" >&-') == (0, "")
        assert run_process("kvtier.cli.app", line, f'exec "$0" "$@" >{tmp_path}/o', PYTHONIOENCODING="ascii") == (0, "")
    written = (tmp_path / "o").read_text(encoding="ascii")
    assert not answer or json.loads(written)[0]["model"] == model
