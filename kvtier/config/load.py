"""Reads the settings and merges them once: defaults < TOML file < environment < flags. Finds all that is wrong."""

import difflib
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import platformdirs
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import EnvSettingsSource, InitSettingsSource

from kvtier.client.address import SOCKET_VARIABLE
from kvtier.config.model import DaemonConfig
from kvtier.config.resolve import resolve
from kvtier.config.settings import AUTO, KEYS, TABLES, OwnerLimits, Settings, variable_of, without_credentials
from kvtier.errors import ConfigError, ConfigErrors
from kvtier.printable import MAX_LISTED

MAX_FILE_BYTES = 1024**2
ENVIRONMENT = "environment"
FLAG = "flag"
DEFAULT = "default"
_OWNERS_PREFIX = "KVTIER_OWNERS_"
_QUOTA_AS_JSON = """must be JSON like {"pins": 100, "bytes": "20GiB"}"""
_PLAIN = {"string_type": "must be text in quotes", "bool_type": "must be true or false"}

Tables = dict[str, Any]
"""Values as written, by table and key."""


@dataclass(frozen=True, kw_only=True)
class LoadedConfig:
    """The merged settings, the source of each by its dotted key, and the TOML file that was read, if any."""

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
    if path is None and _may_be_file(default := default_config_path()):
        path = default
    problems: list[ConfigError] = []
    layers = [
        _Layer(FLAG, Path(), _nested(flags or {})),
        _Layer(ENVIRONMENT, Path(), _environment(os.environ if environ is None else environ, problems)),
    ]
    if path is not None:
        layers.append(_Layer(str(path), path.absolute().parent, _toml(path, problems)))
    layers = [_usable(layer, problems) for layer in layers]

    def origin(key: str) -> _Layer:
        table, _, name = key.partition(".")
        return next((layer for layer in layers if name in layer.tables.get(table, ())), _Layer(DEFAULT, Path(), {}))

    def report(key: str, problem: str) -> None:
        table, _, name = key.partition(".")
        given = origin(key)
        problems.append(ConfigError(key, given.tables.get(table, {}).get(name, AUTO), given.source, problem))

    config = resolve(_settings(*layers), lambda key: origin(key).base_dir, report)
    if problems:
        raise ConfigErrors(problems[:MAX_LISTED])
    return LoadedConfig(config=config, sources={key: origin(key).source for key in KEYS}, path=path)


def _may_be_file(path: Path) -> bool:
    """Return whether a file is there, or its folder is closed to us: reading it says so then."""
    try:
        return path.is_file()
    except OSError:
        return True


def _nested(flags: Mapping[str, object]) -> Tables:
    tables: Tables = {}
    for key, value in flags.items():
        table, _, name = key.partition(".")
        if value is not None:
            tables.setdefault(table, {})[name] = value
    return tables


def _environment(environ: Mapping[str, str], problems: list[ConfigError]) -> Tables:
    """Take the variables of our tables; an empty one counts as not set."""
    # Only those of keys: the library would take KVTIER_HOST for the whole table, as JSON.
    prefixes = tuple(f"KVTIER_{table.upper()}_" for table in TABLES)
    given = {name: value for name, value in environ.items() if name.startswith(prefixes) and value}
    library_name = "KVTIER_SERVER_SOCKET"
    if value := given.pop(library_name, None):
        problem = f"no such setting; did you mean {SOCKET_VARIABLE}?"
        problems.append(ConfigError(library_name, value, ENVIRONMENT, problem))
    if socket := environ.get(SOCKET_VARIABLE):
        given[library_name] = socket
    owners: Tables = {}
    for name in [name for name in given if name.startswith(_OWNERS_PREFIX)]:  # of these the library reads one
        value = given.pop(name)
        try:
            owners[name.removeprefix(_OWNERS_PREFIX).lower()] = json.loads(value)
        except (ValueError, RecursionError):
            problems.append(ConfigError(name, value, ENVIRONMENT, _QUOTA_AS_JSON))
    source = EnvSettingsSource(Settings)
    source.env_vars = {name.lower(): value for name, value in given.items()}
    return source() | ({"owners": owners} if owners else {})


def _toml(path: Path, problems: list[ConfigError]) -> Tables:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) <= MAX_FILE_BYTES:
            return _in_our_case(tomllib.loads(text.decode("utf-8")), path, problems)
        problem = f"has more than {MAX_FILE_BYTES} bytes; name a file of settings"
    except OSError as exc:
        problem = f"cannot be read: {exc.strerror}; name another with --config (KVTIER_CONFIG)"
    except RecursionError:
        problem = "nests lists or tables too deep; settings need no more than [table] and key"
    except ValueError as exc:  # bytes that are no UTF-8 and numbers that Python does not read are such, too
        problem = f"is not valid TOML: {exc}"
    problems.append(ConfigError("config", str(path), "config file", problem))
    return {}


def _in_our_case(tables: Tables, path: Path, problems: list[ConfigError]) -> Tables:
    """Refuse a table like [Log]: pydantic-settings takes it for [log], and then no source of its values is known."""
    strange = {name for name in tables if name not in TABLES and name.lower() in TABLES}
    problems += [
        ConfigError(name, "{...}", str(path), _unknown(name, list(TABLES), "table")) for name in sorted(strange)
    ]
    return {name: content for name, content in tables.items() if name not in strange}


def _settings(*layers: _Layer) -> Settings:
    sources = tuple(InitSettingsSource(Settings, layer.tables) for layer in layers)
    return Settings(_build_sources=(sources, {}))  # type: ignore[call-arg] # only pydantic's mypy plugin knows it


def _usable(layer: _Layer, problems: list[ConfigError]) -> _Layer:
    """Return the layer without what is wrong in it; that is added to `problems`."""
    try:
        _settings(layer)
    except ValidationError as exc:
        bad = {tuple(map(str, error["loc"][:2])): error for error in exc.errors(include_url=False)}
        problems += [_problem(place, error, layer.source) for place, error in [*bad.items()][:MAX_LISTED]]
        usable = {
            table: {name: value for name, value in content.items() if (table, name) not in bad}
            for table, content in layer.tables.items()
            if (table,) not in bad
        }
        return replace(layer, tables=usable)
    return layer


def _problem(place: tuple[str, ...], error: ErrorDetails, source: str) -> ConfigError:
    # Below owners.NAME there are names too.
    key, value, kind = ".".join(map(str, error["loc"])), without_credentials(error["input"]), error["type"]
    if kind == "value_error":
        problem = str(error["ctx"]["error"])
    elif kind == "model_type":
        problem = _QUOTA_AS_JSON if source == ENVIRONMENT else f"is a table; write [{key}] and its keys below it"
    elif kind != "extra_forbidden":
        problem = _PLAIN.get(kind, error["msg"])
    elif len(error["loc"]) > len(place):
        problem = _unknown(str(error["loc"][-1]), list(OwnerLimits.model_fields))
    elif source == ENVIRONMENT:
        key = variable_of(key)
        problem = _unknown(key, [variable_of(each) for each in KEYS])
    elif len(place) == 1 and isinstance(value, dict):
        value, problem = "{...}", _unknown(key, list(TABLES), "table")
    else:
        problem = _unknown(key, KEYS)
    return ConfigError(key, value, source, problem)


def _unknown(key: str, known: Sequence[str], kind: str = "setting") -> str:
    name = key.rpartition(".")[2]
    homes = [each for each in known if each.rpartition(".")[2] == name]
    if homes:
        return f"belongs into another table; write it as {' or '.join(homes)}"
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"no such {kind}; did you mean {close[0]}?" if close else f"no such {kind}; known: {', '.join(known)}"
