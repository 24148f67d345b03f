"""Reads the settings and merges them once: defaults < TOML file < environment < flags. Finds all that is wrong."""

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import platformdirs
from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource, InitSettingsSource

from kvtier.client.address import SOCKET_VARIABLE
from kvtier.config.model import DaemonConfig
from kvtier.config.resolve import resolve
from kvtier.config.settings import AUTO, KEYS, TABLES, Settings, variable_of
from kvtier.errors import ConfigError, ConfigErrors

MAX_FILE_BYTES = 1024**2
MAX_PROBLEMS = 20
"""As many are shown; a file of another kind may have thousands."""
ENVIRONMENT = "environment"
FLAG = "flag"
DEFAULT = "default"
_PLAIN = {"string_type": "must be text in quotes", "bool_type": "must be true or false"}
"""In plainer words than pydantic's."""

Tables = dict[str, Any]
"""Values as written, by table and key."""


@dataclass(frozen=True, kw_only=True)
class LoadedConfig:
    """The merged settings and where each came from.

    Attributes:
        config: The settings.
        sources: By dotted key: `default`, the file's path, `environment` or `flag`.
        path: The TOML file that was read, if any.
    """

    config: DaemonConfig
    sources: Mapping[str, str]
    path: Path | None


@dataclass(frozen=True)
class _Layer:
    """What one source says, and where relative paths in it start. The first layer that has a key wins."""

    source: str
    base_dir: Path
    tables: Tables


def default_config_path() -> Path:
    """Return `$XDG_CONFIG_HOME/kvtier/kvtier.toml`."""
    return platformdirs.user_config_path("kvtier") / "kvtier.toml"


def load_config(
    *,
    path: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> LoadedConfig:
    """Read, merge and check the settings.

    Args:
        path: TOML file; None: the default file if it exists.
        environ: None: the process's environment.
        flags: By dotted key; None values count as not given.

    Raises:
        ConfigErrors: Keys are unknown, values unusable, or the file unreadable. A value is looked at even where
            another source overrides it.
    """
    if path is None and (default := default_config_path()).is_file():
        path = default
    problems: list[ConfigError] = []
    layers = [
        _Layer(FLAG, Path(), _nested(flags or {})),
        _Layer(ENVIRONMENT, Path(), _environment(os.environ if environ is None else environ, problems)),
    ]
    if path is not None:
        layers.append(_Layer(str(path), path.absolute().parent, _toml(path, problems)))
    layers = [_usable(layer, problems) for layer in layers]
    sources = tuple(InitSettingsSource(Settings, layer.tables) for layer in layers)
    merged = Settings(_build_sources=(sources, {}))  # type: ignore[call-arg] # only pydantic's mypy plugin knows it

    def origin(key: str) -> _Layer:
        table, _, name = key.partition(".")
        return next((layer for layer in layers if name in layer.tables.get(table, ())), _Layer(DEFAULT, Path(), {}))

    def report(key: str, problem: str) -> None:
        table, _, name = key.partition(".")
        given = origin(key)
        problems.append(ConfigError(key, given.tables.get(table, {}).get(name, AUTO), given.source, problem))

    config = resolve(merged, lambda key: origin(key).base_dir, report)
    if problems:
        raise ConfigErrors(problems[:MAX_PROBLEMS])
    return LoadedConfig(config=config, sources={key: origin(key).source for key in KEYS}, path=path)


def _nested(flags: Mapping[str, object]) -> Tables:
    tables: Tables = {table: {} for table in TABLES}
    for key, value in flags.items():
        assert key in KEYS, f"a flag names no setting: {key}"
        table, _, name = key.partition(".")
        if value is not None:
            tables[table][name] = value
    return tables


def _environment(environ: Mapping[str, str], problems: list[ConfigError]) -> Tables:
    """Take the variables of our tables; an empty one counts as not set."""
    prefixes = tuple(f"KVTIER_{table.upper()}_" for table in TABLES)
    source = EnvSettingsSource(Settings)
    # Only those of keys: the library would take KVTIER_HOST for the whole table, as JSON.
    source.env_vars = {name.lower(): value for name, value in environ.items() if name.startswith(prefixes) and value}
    tables = source()
    server = tables.setdefault("server", {})
    if "socket" in server:
        problem = f"no such setting; did you mean {SOCKET_VARIABLE}?"
        problems.append(ConfigError("KVTIER_SERVER_SOCKET", server.pop("socket"), ENVIRONMENT, problem))
    if socket := environ.get(SOCKET_VARIABLE):
        server["socket"] = socket
    return tables


def _toml(path: Path, problems: list[ConfigError]) -> Tables:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) <= MAX_FILE_BYTES:
            return tomllib.loads(text.decode("utf-8"))
        problem = f"has more than {MAX_FILE_BYTES} bytes; name a file of settings"
    except OSError as exc:
        problem = f"cannot be read: {exc.strerror}"
    except RecursionError:
        problem = "nests lists or tables too deep; settings need no more than [table] and key"
    except ValueError as exc:  # bytes that are no UTF-8 and numbers that Python does not read are such, too
        problem = f"is not valid TOML: {exc}"
    problems.append(ConfigError("config", str(path), "config file", problem))
    return {}


def _usable(layer: _Layer, problems: list[ConfigError]) -> _Layer:
    """Return the layer without what is wrong in it; that is added to `problems`."""
    usable: Tables = {}
    for table, content in layer.tables.items():
        if len(problems) >= MAX_PROBLEMS:
            break
        if table not in TABLES:
            is_table = isinstance(content, dict)
            problem = _unknown(table, list(TABLES), "table") if is_table else _unknown(table, KEYS)
            problems.append(ConfigError(table, "{...}" if is_table else content, layer.source, problem))
        elif not isinstance(content, dict):
            problem = f"is a table; write [{table}] and its keys below it"
            problems.append(ConfigError(table, content, layer.source, problem))
        else:
            bad = dict(_check(table, content, layer.source))
            problems += bad.values()
            fields = TABLES[table].model_fields.keys() - bad.keys()
            usable[table] = {name: value for name, value in content.items() if name in fields}
    return replace(layer, tables=usable)


def _check(table: str, content: Tables, source: str) -> Iterator[tuple[str, ConfigError]]:
    """Yield the names in a table that cannot be used."""
    try:
        TABLES[table].model_validate(content)
    except ValidationError as exc:
        for error in exc.errors(include_url=False)[:MAX_PROBLEMS]:
            name = str(error["loc"][0])
            key, known = f"{table}.{name}", KEYS
            if error["type"] == "value_error":
                problem = str(error["ctx"]["error"])
            elif error["type"] != "extra_forbidden":
                problem = _PLAIN.get(error["type"], error["msg"])
            else:
                if source == ENVIRONMENT:
                    key, known = variable_of(key), [variable_of(each) for each in KEYS]
                problem = _unknown(key, known)
            yield name, ConfigError(key, content[name], source, problem)


def _unknown(key: str, known: Sequence[str], kind: str = "setting") -> str:
    name = key.rpartition(".")[2]
    homes = [each for each in known if each.rpartition(".")[2] == name]
    if homes:
        return f"belongs into another table; write it as {' or '.join(homes)}"
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"no such {kind}; did you mean {close[0]}?" if close else f"no such {kind}; known: {', '.join(known)}"
