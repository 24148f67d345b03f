"""From what people wrote to what the daemon runs with: absolute paths and bytes, fitted to this machine."""

import grp
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import platformdirs

from kvtier.client.address import default_socket_path, usable_socket_path
from kvtier.config import model
from kvtier.config.access_rules import check_access
from kvtier.config.settings import AUTO, MIN_TIER_BYTES, Settings, checked_size
from kvtier.config.units import available_bytes, filesystem_bytes, format_size, physical_memory_bytes
from kvtier.core.limits import OWNER

AUTO_DISK_CAP_BYTES = 256 * 1024 * model.MIB

_T = TypeVar("_T")


def resolve(
    settings: Settings, base_dir: Callable[[str], Path], report: Callable[[str, str], None]
) -> model.DaemonConfig:
    """Return the daemon's configuration.

    Args:
        settings: Each value is valid by itself.
        base_dir: Where a setting's relative path starts, by dotted key.
        report: Called with the key and the problem of a value that this machine cannot have; the result is void then.
    """

    def place(key: str, text: str, automatic: Path | None = None) -> Path:
        if text == AUTO and automatic is not None:
            return automatic
        return (base_dir(key) / Path(text).expanduser()).absolute()

    def possible(key: str, compute: Callable[[], _T], otherwise: _T) -> _T:
        try:
            return compute()
        except ValueError as exc:
            report(key, str(exc))
            return otherwise

    server, host, disk, cache = settings.server, settings.host, settings.disk, settings.cache
    trace_folder = settings.trace.folder

    def file_of(key: str, text: str) -> Path | None:
        return None if text.lower() == model.OFF else place(key, text)

    access = model.AccessConfig(
        auth=settings.access.auth,
        tls_cert_file=file_of("access.tls_cert_file", settings.access.tls_cert_file),
        tls_key_file=file_of("access.tls_key_file", settings.access.tls_key_file),
        client_ca_file=file_of("access.client_ca_file", settings.access.client_ca_file),
        audit_file=file_of("access.audit_file", settings.access.audit_file),
    )
    check_access(access, {"server.listen": server.listen}, settings.http.listen, report)
    socket = place("server.socket", server.socket, default_socket_path())
    arena_dir = place("host.arena_dir", host.arena_dir, Path(f"/dev/shm/kvtier-{os.getuid()}"))
    disk_dir = place("disk.dir", disk.dir, platformdirs.user_state_path("kvtier"))
    is_traced = trace_folder.lower() != model.OFF
    host_bytes = possible("host.bytes", lambda: _host_bytes(host.bytes, arena_dir), MIN_TIER_BYTES)
    reserve_bytes = min(model.DiskConfig.reserve_bytes, filesystem_bytes(disk_dir) // 20)
    disk_bytes = possible("disk.bytes", lambda: _disk_bytes(disk.bytes, disk_dir), MIN_TIER_BYTES)
    auto_pin_bytes = partial(_auto_pin_bytes, cache.auto_pin_max_bytes, disk_bytes)
    return model.DaemonConfig(
        server=model.ServerConfig(
            socket=possible("server.socket", lambda: usable_socket_path(socket), socket),
            group=server.group,
            gid=possible("server.group", lambda: _gid(server.group), None),
            listen=server.listen,
        ),
        host=model.HostConfig(
            arena_dir=arena_dir,
            host_bytes=host_bytes,
            keep_arena=host.keep_arena,
            preallocated_bytes=min(model.HostConfig.preallocated_bytes, host_bytes // 8),
        ),
        disk=model.DiskConfig(
            disk_dir=disk_dir,
            disk_bytes=disk_bytes,
            reserve_bytes=reserve_bytes,
            compression=disk.compression,
            key_file=place("disk.key_file", disk.key_file) if disk.key_file.lower() != model.OFF else None,
        ),
        cache=model.CacheConfig(
            store=cache.store,
            auto_pin=cache.auto_pin,
            auto_pin_max_bytes=possible("cache.auto_pin_max_bytes", auto_pin_bytes, MIN_TIER_BYTES),
            auto_pin_ttl=cache.auto_pin_ttl,
            auto_pin_min_tokens=cache.auto_pin_min_tokens,
            auto_pin_min_requests=cache.auto_pin_min_requests,
            auto_pin_public=cache.auto_pin_public,
        ),
        owners=_owners(settings, report),
        remote=model.RemoteConfig(**settings.remote.model_dump()),
        http=model.HttpConfig(**settings.http.model_dump()),
        access=access,
        trace=model.TraceConfig(folder=place("trace.folder", trace_folder) if is_traced else None),
        log=model.LogConfig(level=settings.log.level, format=settings.log.format),
    )


def _gid(group: str) -> int | None:
    """Return the number of a group; a number needs no name here, because containers have none."""
    if group == model.OFF:
        return None
    if group.isdecimal():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError as exc:
        raise ValueError(f"there is no such group; make it (`groupadd {group}`), or name another or its gid") from exc


def _owners(settings: Settings, report: Callable[[str, str], None]) -> model.OwnersConfig:
    quotas = {
        name: model.OwnerQuota(**limits.model_dump()) for name, limits in (settings.owners.model_extra or {}).items()
    }
    for name in quotas:
        if not name or not OWNER.fullmatch(name):
            letters = "1 to 64 letters, digits and . _ / @ -, beginning with a letter or digit"
            report(f"owners.{name}", f"no owner can have this name; write it with {letters}")
    return model.OwnersConfig(default=model.OwnerQuota(**settings.owners.default.model_dump()), named=quotas)


def _host_bytes(size: int | float | str, arena_dir: Path) -> int:
    if size == AUTO:
        half_free = available_bytes(arena_dir) // 2
        return max(MIN_TIER_BYTES, min(physical_memory_bytes() // 4, half_free))
    num_bytes = _bytes_of(size, physical_memory_bytes())
    if num_bytes > (limit := filesystem_bytes(arena_dir)):
        raise ValueError(
            f"the file system of {arena_dir} has {format_size(limit)} in all; choose less, or name a larger tmpfs with "
            "host.arena_dir (docker: --shm-size)"
        )
    return num_bytes


def _disk_bytes(size: int | float | str, disk_dir: Path) -> int:
    if size == AUTO:
        return max(MIN_TIER_BYTES, min(available_bytes(disk_dir) // 2, AUTO_DISK_CAP_BYTES))
    return _bytes_of(size, filesystem_bytes(disk_dir))


def _auto_pin_bytes(size: int | float | str, disk_bytes: int) -> int:
    return disk_bytes // 2 if size == AUTO else min(disk_bytes, _bytes_of(size, disk_bytes))


def _bytes_of(size: int | float | str, whole: int) -> int:
    return checked_size(int(whole * size) if isinstance(size, float) else int(size))
