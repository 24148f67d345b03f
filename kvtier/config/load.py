"""Merges the settings once: defaults < TOML file < environment < flags."""

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import platformdirs

from kvtier.config.model import (
    CacheConfig,
    DaemonConfig,
    DiskConfig,
    HostConfig,
    LogConfig,
    MetricsConfig,
    ServerConfig,
    TraceConfig,
)
from kvtier.config.settings import BY_KEY, SETTINGS, ParseContext
from kvtier.config.units import filesystem_bytes
from kvtier.errors import ConfigError

_TABLES = {
    "server": ServerConfig,
    "host": HostConfig,
    "disk": DiskConfig,
    "cache": CacheConfig,
    "metrics": MetricsConfig,
    "trace": TraceConfig,
    "log": LogConfig,
}
SPARE_SHARE = 8
RESERVE_SHARE = 20
MAX_FILE_BYTES = 1024**2
ENVIRONMENT = "environment"
FLAG = "flag"
DEFAULT = "default"


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


@dataclass(frozen=True, kw_only=True)
class _Written:
    """A value as written, and where."""

    value: object
    source: str
    base_dir: Path


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
        ConfigError: A key is unknown, a value unusable, or the file unreadable.
    """
    if path is None and (default := default_config_path()).is_file():
        path = default
    written = _defaults()
    written |= _from_file(path) if path else {}
    written |= _from_environment(os.environ if environ is None else environ)
    written |= _from_flags(flags or {})
    config = _build(written)
    return LoadedConfig(config=config, sources={key: value.source for key, value in written.items()}, path=path)


def _build(written: Mapping[str, _Written]) -> DaemonConfig:
    resolved: dict[str, object] = {}
    for setting in SETTINGS:
        given = written[setting.key]
        context = ParseContext(base_dir=given.base_dir, resolved=resolved)
        try:
            resolved[setting.key] = setting.parse(given.value, context)
        except ValueError as exc:
            raise ConfigError(setting.key, given.value, given.source, str(exc)) from exc
    tables: dict[str, Any] = {
        table: kind(**{s.attribute: resolved[s.key] for s in SETTINGS if s.table == table})
        for table, kind in _TABLES.items()
    }
    return _with_shares(DaemonConfig(**tables))


def _with_shares(config: DaemonConfig) -> DaemonConfig:
    """Take less of a small tier for what has no setting: spare rows, and the reserve on disk."""
    spare_bytes = min(config.host.spare_bytes, config.host.host_bytes // SPARE_SHARE)
    reserve_bytes = min(config.disk.reserve_bytes, filesystem_bytes(config.disk.disk_dir) // RESERVE_SHARE)
    return replace(
        config,
        host=replace(config.host, spare_bytes=spare_bytes),
        disk=replace(config.disk, reserve_bytes=reserve_bytes),
    )


def _defaults() -> dict[str, _Written]:
    return {s.key: _Written(value=s.default, source=DEFAULT, base_dir=Path.cwd()) for s in SETTINGS}


def _from_file(path: Path) -> dict[str, _Written]:
    document = _read_toml(path)
    written = {}
    for table, content in document.items():
        if table not in _TABLES:
            problem = _suggest(table, _TABLES, "no such table") if isinstance(content, dict) else _misplaced(table)
            raise ConfigError(table, _shown(content), str(path), problem)
        if not isinstance(content, dict):
            raise ConfigError(table, content, str(path), f"is a table; write [{table}] and its keys below it")
        for name, value in content.items():
            key = f"{table}.{name}"
            if key not in BY_KEY:
                raise ConfigError(key, value, str(path), _suggest(key, BY_KEY, "no such setting"))
            written[key] = _Written(value=value, source=str(path), base_dir=path.absolute().parent)
    return written


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise _unreadable(path, f"has more than {MAX_FILE_BYTES} bytes; name a file of settings")
        return tomllib.loads(text.decode("utf-8"))
    except OSError as exc:
        raise _unreadable(path, f"cannot be read: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise _unreadable(path, f"is not valid TOML: {exc}") from exc
    except RecursionError as exc:
        raise _unreadable(path, "nests lists or tables too deep; settings need no more than [table] and key") from exc
    except ValueError as exc:  # Python reads no number of more than some 4,300 digits; or a NUL in the path
        raise _unreadable(path, f"cannot be read: {exc}") from exc


def _unreadable(path: Path, problem: str) -> ConfigError:
    return ConfigError("config", str(path), "config file", problem)


def _from_environment(environ: Mapping[str, str]) -> dict[str, _Written]:
    """Take the settings' variables; an empty one counts as not set, an unknown one of our tables is a mistake."""
    by_variable = {setting.environment: setting.key for setting in SETTINGS}
    prefixes = tuple(f"KVTIER_{table.upper()}_" for table in _TABLES)
    written = {}
    for variable, value in environ.items():
        if variable in by_variable:
            if value:
                key = by_variable[variable]
                written[key] = _Written(value=value, source=ENVIRONMENT, base_dir=Path.cwd())
        elif variable.startswith(prefixes):
            raise ConfigError(variable, value, ENVIRONMENT, _suggest(variable, by_variable, "no such variable"))
    return written


def _from_flags(flags: Mapping[str, object]) -> dict[str, _Written]:
    unknown = flags.keys() - BY_KEY.keys()
    assert not unknown, f"flags name no setting: {unknown}"
    return {k: _Written(value=v, source=FLAG, base_dir=Path.cwd()) for k, v in flags.items() if v is not None}


def _suggest(name: str, known: Iterable[str], problem: str) -> str:
    candidates = list(known)
    close = difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
    return f"{problem}; did you mean {close[0]}?" if close else f"{problem}; known: {', '.join(candidates)}"


def _misplaced(name: str) -> str:
    homes = [setting.key for setting in SETTINGS if name in (setting.key.partition(".")[2], setting.attribute)]
    if homes:
        return f"belongs into a table; write it as {homes[0]}"
    return f"no such setting; settings live in the tables {', '.join(f'[{table}]' for table in _TABLES)}"


def _shown(content: object) -> object:
    return "{...}" if isinstance(content, dict) else content
