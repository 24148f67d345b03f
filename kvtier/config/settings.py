"""How each setting is written: its TOML key, its environment variable, its default, its check.

One row per setting, in the order in which they are resolved: an automatic size looks at the folder before it. A parser
takes the value as written (TOML type, or text) and raises ValueError with the remedy.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from kvtier.client.address import SOCKET_VARIABLE, default_socket_path, usable_socket_path
from kvtier.config.model import MIB, OFF
from kvtier.config.units import (
    available_bytes,
    filesystem_bytes,
    format_size,
    parse_address,
    parse_percent,
    parse_size,
    physical_memory_bytes,
)

AUTO = "auto"
AUTO_HOST_RATIO = 0.25
AUTO_DISK_CAP_BYTES = 256 * 1024 * MIB
MIN_TIER_BYTES = MIB
MAX_BYTES = 2**60
"""Far beyond any file system; twice this is no number to SQLite and to the kernel."""


@dataclass(frozen=True, kw_only=True)
class ParseContext:
    """What a parser may look at besides the value: where relative paths start, and settings resolved before."""

    base_dir: Path
    resolved: Mapping[str, object]

    def path(self, key: str) -> Path:
        """Return a path that was resolved before."""
        value = self.resolved[key]
        assert isinstance(value, Path)
        return value


Parser = Callable[[object, ParseContext], object]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting.

    Attributes:
        key: Dotted TOML name.
        attribute: Name in its dataclass.
        parse: Turns a written value into the attribute.
        default: The value as one would write it.
        variable: Environment variable.
    """

    key: str
    attribute: str
    parse: Parser
    default: object
    variable: str = ""

    @property
    def table(self) -> str:
        """TOML table, which is also the attribute of DaemonConfig."""
        return self.key.partition(".")[0]

    @property
    def environment(self) -> str:
        """Environment variable that sets it."""
        return self.variable or "KVTIER_" + self.key.upper().replace(".", "_")


def _path(value: object, context: ParseContext, automatic: Callable[[], Path]) -> Path:
    if not isinstance(value, str | Path):
        raise ValueError("must be a path in quotes")  # noqa: TRY004 (one kind for every unusable value)
    if value == AUTO:
        return automatic()
    return _absolute(value, context)


def _absolute(value: str | Path, context: ParseContext) -> Path:
    if not str(value) or "\0" in str(value):
        raise ValueError("must be a path: some characters, none of them NUL")
    try:
        return (context.base_dir / Path(value).expanduser()).absolute()
    except RuntimeError as exc:
        raise ValueError("~ names the home of a user that there is not here; write the path out") from exc


def _arena_dir(value: object, context: ParseContext) -> Path:
    return _path(value, context, lambda: Path("/dev/shm") / f"kvtier-{os.getuid()}")


def _disk_dir(value: object, context: ParseContext) -> Path:
    return _path(value, context, lambda: platformdirs.user_state_path("kvtier"))


def _socket(value: object, context: ParseContext) -> Path:
    return usable_socket_path(_path(value, context, default_socket_path))


def _size(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError('must be bytes, or a size in quotes like "64GiB"')  # noqa: TRY004
    size = value if isinstance(value, int) else parse_size(value)
    if not MIN_TIER_BYTES <= size <= MAX_BYTES:
        raise ValueError(f"must be at least {format_size(MIN_TIER_BYTES)} and at most {format_size(MAX_BYTES)}")
    return size


def _host_bytes(value: object, context: ParseContext) -> int:
    arena_dir = context.path("host.arena_dir")
    ratio = parse_percent(value) if isinstance(value, str) else None
    if value == AUTO:
        half_free = available_bytes(arena_dir) // 2
        return max(MIN_TIER_BYTES, min(int(physical_memory_bytes() * AUTO_HOST_RATIO), half_free))
    size = _size(value if ratio is None else int(physical_memory_bytes() * ratio))
    if size > (limit := filesystem_bytes(arena_dir)):
        raise ValueError(
            f"the file system of {arena_dir} has {format_size(limit)} in all; choose less, or name a larger tmpfs with "
            "host.arena_dir (docker: --shm-size)"
        )
    return size


def _disk_bytes(value: object, context: ParseContext) -> int:
    disk_dir = context.path("disk.dir")
    ratio = parse_percent(value) if isinstance(value, str) else None
    if value == AUTO:
        return max(MIN_TIER_BYTES, min(available_bytes(disk_dir) // 2, AUTO_DISK_CAP_BYTES))
    return _size(value if ratio is None else int(filesystem_bytes(disk_dir) * ratio))


def _choice(*choices: str) -> Parser:
    def parse(value: object, context: ParseContext) -> str:
        if not isinstance(value, str) or value.lower() not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return value.lower()

    return parse


def _listen(value: object, context: ParseContext) -> str:
    if not isinstance(value, str):
        raise ValueError(f'must be an address in quotes, like "127.0.0.1:9464", or "{OFF}"')  # noqa: TRY004
    if value.lower() == OFF:
        return OFF
    parse_address(value)
    return value


def _folder_or_off(value: object, context: ParseContext) -> Path | None:
    if isinstance(value, str) and value.lower() == OFF:
        return None
    if not isinstance(value, str) or not value:
        raise ValueError(f'must be a path in quotes, or "{OFF}"')
    return _absolute(value, context)


def _switch(value: object, context: ParseContext) -> bool:
    # Text comes from the environment.
    text = str(value).lower() if isinstance(value, bool | str) else ""
    if text not in ("true", "false"):
        raise ValueError("must be true or false")
    return text == "true"


def _row(key: str, attribute: str, parse: Parser, default: object, variable: str = "") -> Setting:
    return Setting(key=key, attribute=attribute, parse=parse, default=default, variable=variable)


SETTINGS = (
    _row("server.socket", "socket", _socket, AUTO, SOCKET_VARIABLE),
    _row("host.arena_dir", "arena_dir", _arena_dir, AUTO),
    _row("host.bytes", "host_bytes", _host_bytes, AUTO),
    _row("host.keep_arena", "keep_arena", _switch, False),
    _row("disk.dir", "disk_dir", _disk_dir, AUTO),
    _row("disk.bytes", "disk_bytes", _disk_bytes, AUTO),
    _row("cache.store", "store", _choice("pinned", "all"), "pinned"),
    _row("metrics.listen", "listen", _listen, "127.0.0.1:9464"),
    _row("trace.folder", "folder", _folder_or_off, OFF),
    _row("log.level", "level", _choice("debug", "info", "warning", "error"), "info"),
    _row("log.format", "format", _choice("text", "json"), "text"),
)
BY_KEY = {setting.key: setting for setting in SETTINGS}
