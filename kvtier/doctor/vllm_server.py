"""A running vLLM, as its HTTP server describes it."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvtier._pb.cache_pb2 import DaemonStatus
from kvtier.doctor.engine_environment import EngineEnvironment, check_version
from kvtier.doctor.report import CheckResult, fail, ok, skipped, warn
from kvtier.errors import KvtierError

_CHECKS = ("server.answers", "server.prefix_caching", "server.hash_algorithm", "server.attached")


class VllmServer(Protocol):
    """Questions to vLLM; `VllmClient` answers them. KvtierError: no vLLM answers, or vLLM refuses."""

    def version(self) -> str: ...

    def cache_config(self) -> Mapping[str, str]:
        """Return the CacheConfig of vLLM from its metrics; empty when they do not show it."""

    def model_names(self) -> Sequence[str]: ...


def check_server(
    server: VllmServer | None, environment: EngineEnvironment, status: DaemonStatus | None
) -> list[CheckResult]:
    """Judge a running vLLM.

    Args:
        server: None: no URL was given.
        environment: What the connector supports.
        status: Of the daemon; None: it does not answer.
    """
    if server is None:
        return [skipped(check, "no URL of a vLLM was given: --url") for check in _CHECKS]
    try:
        version, config, names = server.version(), server.cache_config(), server.model_names()
    except KvtierError as exc:
        first, *others = _CHECKS
        problem = fail(first, str(exc), "start vLLM, or correct --url")
        return [problem, *(skipped(check, "vLLM does not answer") for check in others)]
    return [
        check_version("server.answers", version, environment.series, f"vLLM {version}"),
        _check_prefix_caching(config.get("enable_prefix_caching", "")),
        _check_hash_algorithm(config.get("prefix_caching_hash_algo", ""), environment.hashes),
        _check_attached(names, status),
    ]


def _check_prefix_caching(enabled: str) -> CheckResult:
    if not enabled:
        return skipped("server.prefix_caching", "vLLM's metrics do not show it")
    if enabled != "True":
        remedy = "start vLLM with --enable-prefix-caching; the connector refuses to start without it"
        return fail("server.prefix_caching", "off", remedy)
    return ok("server.prefix_caching", "on")


def _check_hash_algorithm(algorithm: str, stable: Sequence[str]) -> CheckResult:
    """Judge --prefix-caching-hash-algo; PYTHONHASHSEED is in the environment of vLLM and not visible here."""
    if not algorithm or not stable:
        return skipped("server.hash_algorithm", "not known" if algorithm else "vLLM's metrics do not show it")
    if algorithm not in stable:
        remedy = "use --prefix-caching-hash-algo sha256, or start vLLM with a fixed PYTHONHASHSEED every time"
        return warn("server.hash_algorithm", f"{algorithm}, which gets a new seed at every start", remedy)
    return ok("server.hash_algorithm", algorithm)


def _check_attached(model_names: Sequence[str], status: DaemonStatus | None) -> CheckResult:
    """Find an engine with these models among the sessions of the daemon."""
    if status is None:
        return skipped("server.attached", "no daemon answers")
    served = {name for session in status.sessions if not session.quarantined for name in session.model_names}
    if attached := served.intersection(model_names):
        return ok("server.attached", ", ".join(sorted(attached)))
    how = "start it with --kv-transfer-config naming KVTierConnector and with this daemon's socket; its log says more"
    return fail("server.attached", f"no engine that serves {', '.join(model_names) or 'a model'}", how)
