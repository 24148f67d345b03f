"""A running vLLM, by what it serves over HTTP."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvtier._pb.cache_pb2 import DaemonStatus
from kvtier.doctor.engine_environment import EngineEnvironment, supports
from kvtier.doctor.report import Finding, fail, ok, skipped, warn
from kvtier.errors import KvtierError

_CHECKS = ("server.answers", "server.prefix_caching", "server.hash_algorithm", "server.attached")


class VllmServer(Protocol):
    """What is asked of vLLM. Every method raises KvtierError when nobody answers or vLLM refuses."""

    def version(self) -> str:
        """Return vLLM's version."""

    def cache_config(self) -> Mapping[str, str]:
        """Return vLLM's CacheConfig as its metrics show it; empty when they do not."""

    def model_names(self) -> Sequence[str]:
        """Return what requests may call the models."""


def check_server(
    server: VllmServer | None, environment: EngineEnvironment, status: DaemonStatus | None
) -> list[Finding]:
    """Judge a running vLLM.

    Args:
        server: None: no URL was given.
        environment: What the connector says it supports.
        status: The daemon's; None: it does not answer.
    """
    if server is None:
        return [skipped(check, "no URL of a vLLM was given: --url") for check in _CHECKS]
    try:
        version, cache_config, model_names = server.version(), server.cache_config(), server.model_names()
    except KvtierError as exc:
        first, *others = _CHECKS
        problem = fail(first, str(exc), "start vLLM, or correct --url")
        return [problem, *(skipped(check, "vLLM does not answer") for check in others)]
    return [
        check_server_version(version, environment.series),
        check_prefix_caching(cache_config.get("enable_prefix_caching", "")),
        check_hash_algorithm(cache_config.get("prefix_caching_hash_algo", ""), environment.hashes),
        check_attached(model_names, status),
    ]


def check_server_version(version: str, series: str) -> Finding:
    """Compare with what the connector is written for."""
    if series and not supports(series, version):
        remedy = f"install vLLM {series}, or a kvtier for that vLLM"
        return fail("server.answers", f"vLLM {version}; the connector is written for {series}", remedy)
    return ok("server.answers", f"vLLM {version}")


def check_prefix_caching(enabled: str) -> Finding:
    """Judge --enable-prefix-caching, as vLLM's metrics say it."""
    if not enabled:
        return skipped("server.prefix_caching", "vLLM's metrics do not say")
    if enabled != "True":
        remedy = "start vLLM with --enable-prefix-caching; the connector refuses to start without"
        return fail("server.prefix_caching", "off", remedy)
    return ok("server.prefix_caching", "on")


def check_hash_algorithm(algorithm: str, stable: Sequence[str]) -> Finding:
    """Judge --prefix-caching-hash-algo; vLLM's environment, where PYTHONHASHSEED stands, cannot be seen from here."""
    if not algorithm or not stable:
        return skipped("server.hash_algorithm", "not known" if algorithm else "vLLM's metrics do not say")
    if algorithm not in stable:
        remedy = (
            "use --prefix-caching-hash-algo sha256, or make sure that vLLM has a fixed PYTHONHASHSEED at every start"
        )
        return warn("server.hash_algorithm", f"{algorithm}, which is seeded anew at every start", remedy)
    return ok("server.hash_algorithm", algorithm)


def check_attached(model_names: Sequence[str], status: DaemonStatus | None) -> Finding:
    """Look for an engine of these models among the daemon's sessions."""
    if status is None:
        return skipped("server.attached", "no daemon answers")
    attached = {name for session in status.sessions if not session.quarantined for name in session.model_names}
    if not attached & set(model_names):
        remedy = (
            "start it with --kv-transfer-config naming KVTierConnector and with this daemon's socket; its log says more"
        )
        return fail("server.attached", f"no engine that serves {', '.join(model_names) or 'a model'}", remedy)
    return ok("server.attached", ", ".join(sorted(attached & set(model_names))))
