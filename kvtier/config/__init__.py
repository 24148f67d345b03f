"""The daemon's settings: written (`settings`), merged (`load`), fitted to the machine (`resolve`), and used (`model`).

Only `model` and `units` are imported by the CLI: what reads settings needs pydantic, which takes a while to import.
"""

from kvtier.config.model import (
    CacheConfig,
    DaemonConfig,
    DiskConfig,
    HostConfig,
    HttpConfig,
    LogConfig,
    ServerConfig,
    TraceConfig,
)

__all__ = [
    "CacheConfig",
    "DaemonConfig",
    "DiskConfig",
    "HostConfig",
    "HttpConfig",
    "LogConfig",
    "ServerConfig",
    "TraceConfig",
]
