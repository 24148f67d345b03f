"""The gRPC server of the daemon: both services, standard health and reflection, on one unix socket.

Without engines and reflection it is also at `server.listen`, see `kvtier.rpc.doors.tcp_server`.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from kvtier._pb import cache_pb2, cache_pb2_grpc, engine_pb2, engine_pb2_grpc
from kvtier.access.caller import Door
from kvtier.access.gatekeeper import Gatekeeper
from kvtier.access.tls_files import TlsFiles
from kvtier.client.address import channel_target
from kvtier.concurrency.pauses import LOOK_S, until_next
from kvtier.concurrency.tasks import kept_running
from kvtier.config import DaemonConfig
from kvtier.core.limits import MAX_MESSAGE_BYTES
from kvtier.errors import TierIOError
from kvtier.fleet.fleet import Fleet, open_fleet
from kvtier.host.group_access import share_socket
from kvtier.rpc.cache_servicer import CacheServicer
from kvtier.rpc.doors.access_control import AccessControl
from kvtier.rpc.doors.opened_gatekeeper import kept_fresh, opened_gatekeeper
from kvtier.rpc.doors.tcp_server import read_tls_files, serving_tcp
from kvtier.rpc.engine_servicer import EngineServicer
from kvtier.rpc.error_statuses import ErrorStatuses
from kvtier.rpc.http_serving import HttpState, serving_http
from kvtier.service import Cache
from kvtier.service.cache import STUCK_AFTER_S

HANDSHAKE_TIMEOUT_S = 20.0
"""From a connection to its HTTP/2 settings, which a gRPC client sends at once: as long as it waits for ours."""
IDLE_TIMEOUT_S = 300.0
"""A connection without a call is closed; clients connect again by themselves. A session is a call: no clock ends it,
nor a keepalive, which a stopped engine (SIGSTOP) would not answer. The kernel reports engines that end."""

PINS_SERVICE = "kvtier.pins"
"""In the health service: serving while every prompt that operators pinned is durable for the attached engines."""

_REST = 20.0
"""A look at readiness is followed by a pause of this many times what it took: one goes through all pins that are other
hosts' and not durable here, 10 ms for 10,000."""

_SERVICES = (
    engine_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name,
    cache_pb2.DESCRIPTOR.services_by_name["CacheService"].full_name,
)


async def serve(config: DaemonConfig, *, stop: asyncio.Event, ready: Callable[[], None] | None = None) -> Path | None:
    """Serve until `stop` is set or a file that clients need is removed, then drain within `drain_timeout_s`.

    Args:
        config: Its folders exist and are locked.
        stop: Set by the caller to end the daemon.
        ready: Called once calls are answered.

    Returns:
        A file that another process has removed: the socket, an arena (or shortened it) or a session's lock. Only a new
        start makes another one. None: `stop` was set, before or during the drain.

    Raises:
        KvtierError: The stores cannot be opened, the socket or the TCP port cannot be bound, or a certificate cannot be
            used.
    """
    tls = await asyncio.to_thread(read_tls_files, config.access)
    async with opened_gatekeeper(config) as gatekeeper:
        return await _serve(config, tls, gatekeeper, stop, ready)


async def _serve(
    config: DaemonConfig,
    tls: TlsFiles | None,
    gatekeeper: Gatekeeper,
    stop: asyncio.Event,
    ready: Callable[[], None] | None,
) -> Path | None:
    cache = await Cache.open(config)
    fleet: Fleet | None = None
    try:
        fleet = open_fleet(cache, config.remote)
        if fleet is not None:
            fleet.start()
        http = HttpState()
        engines, health_servicer = EngineServicer(cache), HealthServicer()
        cache_servicer = CacheServicer(cache, http, gatekeeper, fleet)
        server = _build(engines, cache_servicer, health_servicer, gatekeeper)
        _bind(server, config)
        async with (
            kept_fresh(gatekeeper, cache.resources.counters),
            serving_tcp(config, tls, gatekeeper, cache_servicer, health_servicer),
        ):
            await server.start()
            await _set_health(health_servicer, health_pb2.HealthCheckResponse.SERVING)
            if ready is not None:
                ready()
            reporting = partial(_report_readiness, health_servicer, cache)
            readiness = asyncio.create_task(kept_running("readiness", reporting), name="readiness")
            try:
                async with serving_http(config, gatekeeper, cache, http):
                    removed = await _until_stopped_or_removed(stop, config, cache)
            finally:
                readiness.cancel()
                await asyncio.wait({readiness})
            await _set_health(health_servicer, health_pb2.HealthCheckResponse.NOT_SERVING)
            engines.finish_all()
            await server.stop(grace=min(1.0, config.server.drain_timeout_s))
    finally:
        await close_both(fleet, cache)
    return None if stop.is_set() else removed


async def close_both(fleet: Fleet | None, cache: Cache) -> None:
    """Close the fleet and then the cache; raises as `Cache.close`, for which an upload whose read hangs is left."""
    if fleet is not None:
        closing = asyncio.create_task(fleet.close(), name="fleet-close")
        await asyncio.wait([closing], timeout=STUCK_AFTER_S)
    await cache.close()
    if fleet is not None:
        await closing


async def _until_stopped_or_removed(stop: asyncio.Event, config: DaemonConfig, cache: Cache) -> Path | None:
    while not stop.is_set():
        files = [config.server.socket, *cache.shared_files]
        cache.give_up_shortened_arenas()  # unlinks them, so that they count as removed
        for path in files:
            if _is_removed(path):
                return path
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 0.5)  # docs/faults.md says what that half second means
    return None


def _is_removed(path: Path) -> bool:
    with suppress(OSError):  # without permission to look, it counts as there
        return not path.exists()
    return False


def _build(
    engines: EngineServicer, cache_servicer: CacheServicer, health_servicer: HealthServicer, gatekeeper: Gatekeeper
) -> grpc.aio.Server:
    options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_TIMEOUT_S * 1000)),
        ("grpc.max_connection_idle_ms", int(IDLE_TIMEOUT_S * 1000)),
    ]
    interceptors = [ErrorStatuses(), AccessControl(gatekeeper, Door.SOCKET)]
    server = grpc.aio.server(interceptors=interceptors, options=options)
    engine_pb2_grpc.add_EngineServiceServicer_to_server(engines, server)
    cache_pb2_grpc.add_CacheServiceServicer_to_server(cache_servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection((*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return server


def _bind(server: grpc.aio.Server, config: DaemonConfig) -> None:
    try:
        server.add_insecure_port(channel_target(config.server.socket))
    except RuntimeError as error:
        raise TierIOError(config.server.socket, "bind the socket", OSError(0, str(error))) from error
    try:
        share_socket(config.server.socket, config.server.gid)
    except OSError as error:
        raise TierIOError(config.server.socket, "give the socket to server.group", error) from error


async def _report_readiness(servicer: HealthServicer, cache: Cache) -> None:
    """Set the health of `PINS_SERVICE` for ever."""
    while True:
        began_s = time.monotonic()
        is_ready = not cache.readiness.problem()
        pause_s = max(until_next(LOOK_S), (time.monotonic() - began_s) * _REST)
        state = health_pb2.HealthCheckResponse.SERVING if is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
        await servicer.set(PINS_SERVICE, state)
        await asyncio.sleep(pause_s)


async def _set_health(
    servicer: HealthServicer, state: "health_pb2.HealthCheckResponse.ServingStatus.ValueType"
) -> None:
    for service in ("", *_SERVICES):
        await servicer.set(service, state)
    await servicer.set(PINS_SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
