"""Every setting as people write it: a model for each TOML table, a field for each key, and what it accepts."""

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, Strict
from pydantic_settings import BaseSettings, SettingsConfigDict

from kvtier.client.address import MAX_UID, SOCKET_VARIABLE
from kvtier.config.model import MIB, OFF, AuthMode, AutoPinMode, CompressionMode, LogFormat, LogLevel, StoreMode
from kvtier.config.units import format_size, parse_address, parse_percent, parse_size
from kvtier.core.limits import MAX_TOKENS
from kvtier.core.ttl import seconds_of

AUTO = "auto"
REMOTE_SCHEMES = ("s3", "gs", "az", "file")
POOL_SCHEME = "mooncake"
_POOL = re.compile(r"[A-Za-z0-9.-]+:[0-9]{1,5}(/[A-Za-z0-9._-]+)*/?")
MIN_GRACE_S = 600
_CREDENTIALS = re.compile(r"://.*@", re.DOTALL)
"""Also those with a slash, which half of all secret keys of AWS have."""
MIN_TIER_BYTES = MIB
MAX_BYTES = 2**60
"""Far beyond any file system; twice this is no number to SQLite and to the kernel."""


def checked_size(num_bytes: int) -> int:
    """Return the size of a tier. Raises ValueError when no tier can have it."""
    if not MIN_TIER_BYTES <= num_bytes <= MAX_BYTES:
        raise ValueError(f"must be at least {format_size(MIN_TIER_BYTES)} and at most {format_size(MAX_BYTES)}")
    return num_bytes


def _size(value: object) -> int | float | str:
    if isinstance(value, str):
        share = parse_percent(value)
        return AUTO if value == AUTO else checked_size(parse_size(value)) if share is None else share
    if isinstance(value, int) and not isinstance(value, bool):
        return checked_size(value)
    raise ValueError('must be bytes, or a size in quotes like "64GiB"')


def _plain_size(value: object) -> object:
    if isinstance(value, str):
        value = parse_size(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_BYTES:
        return value
    raise ValueError('must be bytes, or a size in quotes like "64GiB"; at most 2**60 bytes')


def _path(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError("must be a path: some characters, none of them NUL")
    try:
        Path(text).expanduser()
    except RuntimeError as exc:
        raise ValueError("~ names the home of a user that there is not here; write the path out") from exc
    return text


def _group(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _group_name(text: str) -> str:
    if text.lower() == OFF:
        return OFF
    if not text or any(not character.isprintable() or character in ": " for character in text):
        raise ValueError(f'must be a group\'s name or number, or "{OFF}"')
    if text.lstrip("-").isdigit() and not (text.isascii() and len(text) <= 10 and 0 <= int(text) <= MAX_UID):
        raise ValueError(f"must be a gid, a whole number up to {MAX_UID}; `getent group NAME` prints it")
    return text


def _address(text: str) -> str:
    if text.lower() == OFF:
        return OFF
    parse_address(text)
    return text


def _duration(text: str) -> str:
    seconds_of(text)
    return text


def _pause(text: str) -> str:
    if not seconds_of(text):
        raise ValueError('must be a duration like "30s"')
    return text


def _grace(text: str) -> str:
    if seconds_of(text) < MIN_GRACE_S:
        raise ValueError('must be at least "10m": clocks of hosts and store may differ, and uploads take time')
    return text


def _url(text: str) -> str:
    if text.lower() == OFF:
        return OFF
    scheme, separator, rest = text.partition("://")
    if scheme == POOL_SCHEME:
        raise ValueError("a pool in memory forgets pins; name a bucket or folder here, and the pool as `remote.pool`")
    if not separator or scheme not in REMOTE_SCHEMES or not rest.strip("/"):
        schemes = ", ".join(f"{scheme}://" for scheme in REMOTE_SCHEMES)
        raise ValueError(f"must begin with one of {schemes} and name a bucket or folder; or be {OFF}")
    if any(character in rest.partition("/")[0] for character in ":@"):  # no bucket's name has either
        raise ValueError("must not hold credentials; give them in the daemon's environment")
    return text.rstrip("/")


def _vllm_url(text: str) -> str:
    scheme, separator, rest = text.partition("://")
    host = rest.partition("/")[0]
    if not separator or scheme not in ("http", "https") or not host or any(c.isspace() or c in "?#" for c in text):
        raise ValueError('must be the base URL of a vLLM, like "http://127.0.0.1:8000"')
    if "@" in rest:
        raise ValueError("must not hold credentials; give VLLM_API_KEY in the daemon's environment")
    return text.rstrip("/")


def _pool(text: str) -> str:
    if text.lower() == OFF:
        return OFF
    scheme, _, rest = text.partition("://")
    if scheme != POOL_SCHEME or not _POOL.fullmatch(rest):
        raise ValueError(f"must be {POOL_SCHEME}://HOST:PORT/PREFIX, of a Mooncake master; or {OFF}")
    return text.rstrip("/")


def without_credentials(value: object) -> object:
    """Return a value that is to be shown, without what stands before the host of a URL."""
    return _CREDENTIALS.sub("://...@", value) if isinstance(value, str) else value


def _price(value: object) -> object:
    if not isinstance(value, str | int) or isinstance(value, bool):
        return value
    try:
        return float(value)
    except OverflowError as exc:
        raise ValueError("must be dollars, at most a million") from exc


def _number(value: object) -> object:
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _switch(value: object) -> object:
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


PathText = Annotated[str, AfterValidator(_path)]
Size = Annotated[int | float | str, PlainValidator(_size)]
"""Bytes; a float: a share of what there is; or `AUTO`."""


Price = Annotated[float, BeforeValidator(_price), Field(ge=0, le=1e6, allow_inf_nan=False)]
"""Dollars."""


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Server(_Table):
    socket: PathText = AUTO
    group: Annotated[str, AfterValidator(_group_name), BeforeValidator(_group)] = OFF
    listen: Annotated[str, AfterValidator(_address)] = OFF


class _Host(_Table):
    arena_dir: PathText = AUTO
    bytes: Size = AUTO
    keep_arena: Annotated[bool, Strict(), BeforeValidator(_switch)] = False


class _Disk(_Table):
    dir: PathText = AUTO
    bytes: Size = AUTO
    compression: Annotated[CompressionMode, BeforeValidator(_lower)] = "auto"
    key_file: PathText = OFF


class _Cache(_Table):
    store: Annotated[StoreMode, BeforeValidator(_lower)] = "pinned"
    auto_pin: Annotated[AutoPinMode, BeforeValidator(_lower)] = "pin"
    auto_pin_max_bytes: Size = AUTO
    auto_pin_ttl: Annotated[str, AfterValidator(_duration)] = "30d"
    auto_pin_min_tokens: Annotated[int, BeforeValidator(_number), Field(ge=1, le=MAX_TOKENS)] = 1024
    auto_pin_min_requests: Annotated[int, BeforeValidator(_number), Field(ge=2, le=1_000_000)] = 3
    auto_pin_public: Annotated[bool, Strict(), BeforeValidator(_switch)] = False


class OwnerLimits(_Table):
    """One owner's quota."""

    pins: Annotated[int, Strict(), Field(ge=0)] | None = None
    tokens: Annotated[int, Strict(), Field(ge=0)] | None = None
    bytes: Annotated[int, PlainValidator(_plain_size)] | None = None


class _Owners(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    default: OwnerLimits = OwnerLimits()
    __pydantic_extra__: dict[str, OwnerLimits] = Field(init=False)


class _Remote(_Table):
    url: Annotated[str, AfterValidator(_url)] = OFF
    pool: Annotated[str, AfterValidator(_pool)] = OFF
    poll: Annotated[str, AfterValidator(_pause)] = "30s"
    grace: Annotated[str, AfterValidator(_grace)] = "1d"
    upload_bytes_per_s: Annotated[int, PlainValidator(_plain_size)] = 0
    download_bytes_per_s: Annotated[int, PlainValidator(_plain_size)] = 0
    dollars_per_1000_writes: Price = 0.005
    dollars_per_1000_reads: Price = 0.0004
    dollars_per_gib_up: Price = 0.0
    dollars_per_gib_down: Price = 0.0


class _Http(_Table):
    listen: Annotated[str, AfterValidator(_address)] = "127.0.0.1:9464"
    vllm_url: Annotated[str, AfterValidator(_vllm_url)] = "http://127.0.0.1:8000"


class _Access(_Table):
    auth: Annotated[AuthMode, BeforeValidator(_lower)] = "token"
    tls_cert_file: PathText = OFF
    tls_key_file: PathText = OFF
    client_ca_file: PathText = OFF
    audit_file: PathText = OFF


class _Trace(_Table):
    folder: PathText = OFF


class _Log(_Table):
    level: Annotated[LogLevel, BeforeValidator(_lower)] = "info"
    format: Annotated[LogFormat, BeforeValidator(_lower)] = "text"


class Settings(BaseSettings):
    """All tables."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, env_prefix="KVTIER_", env_nested_delimiter="_", env_nested_max_split=1
    )

    server: _Server = _Server()
    host: _Host = _Host()
    disk: _Disk = _Disk()
    cache: _Cache = _Cache()
    owners: _Owners = _Owners()
    remote: _Remote = _Remote()
    access: _Access = _Access()
    http: _Http = _Http()
    trace: _Trace = _Trace()
    log: _Log = _Log()


TABLES: dict[str, Any] = {table: field.annotation for table, field in Settings.model_fields.items()}
KEYS = [f"{table}.{name}" for table, model in TABLES.items() for name in model.model_fields]


def variable_of(key: str) -> str:
    """Return the environment variable of a setting; that of the socket is the one that clients read too."""
    return SOCKET_VARIABLE if key == "server.socket" else "KVTIER_" + key.upper().replace(".", "_")
