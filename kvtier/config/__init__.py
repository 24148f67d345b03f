"""The daemon's settings: what they are (`model`), how they are written (`settings`), how they are merged (`load`)."""

from kvtier.config.load import LoadedConfig, default_config_path, load_config
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

__all__ = [
    "CacheConfig",
    "DaemonConfig",
    "DiskConfig",
    "HostConfig",
    "LoadedConfig",
    "LogConfig",
    "MetricsConfig",
    "ServerConfig",
    "TraceConfig",
    "default_config_path",
    "load_config",
]
