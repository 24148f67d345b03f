"""The gRPC server at `server.listen`: for operators on other hosts; engines attach over the unix socket only."""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from kvtier._pb import cache_pb2_grpc
from kvtier.access.caller import Door
from kvtier.access.gatekeeper import Gatekeeper
from kvtier.access.tls_files import TlsData, TlsFiles
from kvtier.config import DaemonConfig
from kvtier.config.model import OFF, AccessConfig
from kvtier.config.units import parse_address
from kvtier.core.limits import MAX_MESSAGE_BYTES
from kvtier.errors import ConfigError
from kvtier.obs.log import log_event
from kvtier.rpc.doors.access_control import MAX_CALLS, AccessControl
from kvtier.rpc.error_statuses import ErrorStatuses

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
"""More are closed at once: they would take the descriptors that engines and packs need."""
HANDSHAKE_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 60.0
"""A connection without a call is closed; clients connect again by themselves."""
_TLS_CHECK_TIMEOUT_S = 5.0


def read_tls_files(access: AccessConfig) -> TlsFiles | None:
    """Read the certificates for one server, None without TLS. Blocks; ConfigError: one cannot be used."""
    if access.tls_cert_file is None:
        return None
    assert access.tls_key_file is not None
    return TlsFiles(access.tls_cert_file, access.tls_key_file, access.client_ca_file)


@asynccontextmanager
async def serving_tcp(
    config: DaemonConfig,
    tls: TlsFiles | None,
    gatekeeper: Gatekeeper,
    cache_servicer: cache_pb2_grpc.CacheServiceServicer,
    health_servicer: HealthServicer,
) -> AsyncIterator[None]:
    """Serve operators over TCP during the block, unless `server.listen` is off.

    Raises:
        ConfigError: It cannot listen there, or would take TLS 1.2.
    """
    if config.server.listen == OFF:
        yield
        return
    server = _build(gatekeeper)
    cache_pb2_grpc.add_CacheServiceServicer_to_server(cache_servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    host, port = parse_address(config.server.listen)
    shown_host = f"[{host}]" if ":" in host else host
    try:
        if tls is None:
            port = server.add_insecure_port(f"{shown_host}:{port}")
        else:
            port = server.add_secure_port(f"{shown_host}:{port}", _credentials(tls))
    except RuntimeError as exc:
        problem = f'cannot listen there; name another address, or "{OFF}", or free this one'
        raise ConfigError("server.listen", config.server.listen, "start", problem) from exc
    await server.start()
    try:
        if tls is not None:
            await _refuse_tls12(config.server.listen, host, port)
        log_event(
            logger,
            "tcp_served",
            address=f"{shown_host}:{port}",
            tls=tls is not None,
            client_certificates=config.access.client_ca_file is not None,
            credentials=config.access.auth == "token",
        )
        yield
    finally:
        await server.stop(grace=min(1.0, config.server.drain_timeout_s))


def _build(gatekeeper: Gatekeeper) -> grpc.aio.Server:
    options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_TIMEOUT_S * 1000)),
        ("grpc.max_connection_idle_ms", int(IDLE_TIMEOUT_S * 1000)),
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
        ("grpc.max_concurrent_streams", 100),
        ("grpc.keepalive_time_ms", 60_000),  # a host that is gone says nothing, and its watches would stay
        ("grpc.so_reuseport", 0),  # or another process of this user could take a part of the connections
    ]
    interceptors = [ErrorStatuses(), AccessControl(gatekeeper, Door.GRPC)]
    return grpc.aio.server(interceptors=interceptors, options=options, maximum_concurrent_rpcs=MAX_CALLS)


def _credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """Return what gRPC serves with; it asks for the files again at each handshake."""

    def renewed() -> Any:
        data = tls.renewed()
        return None if data is None else _certificates(data)

    return grpc.dynamic_ssl_server_credentials(
        _certificates(tls.data), renewed, require_client_authentication=tls.client_ca is not None
    )


def _certificates(data: TlsData) -> Any:
    return grpc.ssl_server_certificate_configuration([(data.key, data.certificate)], data.authorities)


async def _refuse_tls12(listen: str, host: str, port: int) -> None:
    """Try TLS 1.2 once: gRPC's Python has no setting for it, see `kvtier.process.prepare_grpc`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        async with asyncio.timeout(_TLS_CHECK_TIMEOUT_S):
            _, writer = await asyncio.open_connection(here, port, ssl=context)
    except (OSError, TimeoutError):
        return
    writer.transport.abort()
    remedy = "unset GRPC_SSL_CIPHER_SUITES and start `kvtier-daemon`, which sets it before gRPC is loaded"
    raise ConfigError("server.listen", listen, "start", f"this process would take TLS 1.2; {remedy}")
