"""The certificate of the TCP port: read at the start, and again at the first handshake after its files changed."""

import logging
import ssl
import threading
from pathlib import Path
from typing import Any

import grpc

from kvtier.config.model import AccessConfig
from kvtier.errors import ConfigError
from kvtier.obs.log import log_event

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 1024**2

_Stamp = tuple[tuple[int, ...], ...]


class TlsFiles:
    """Certificate, key, and the authorities of clients. Any thread: gRPC asks in the thread of a handshake.

    Files that are being renewed may not fit together for a moment: then what was read before is used, and the next
    handshake looks again.
    """

    def __init__(self, access: AccessConfig) -> None:
        """Read the files, of which there have to be certificate and key.

        Raises:
            ConfigError: One cannot be used; it names the setting.
        """
        assert access.tls_cert_file is not None
        assert access.tls_key_file is not None
        self._cert, self._key, self._client_ca = access.tls_cert_file, access.tls_key_file, access.client_ca_file
        self._lock = threading.Lock()  # protects the two below
        self._stamp = self._stamp_now()
        self._is_failing = False
        self._first = self._read()

    def credentials(self) -> grpc.ServerCredentials:
        """Return what gRPC serves with; it asks for the files again at each handshake."""
        return grpc.dynamic_ssl_server_credentials(
            self._first, self._renewed, require_client_authentication=self._client_ca is not None
        )

    def _renewed(self) -> Any:
        """Return new certificates, None if the files are as they were or cannot be used now."""
        with self._lock:
            stamp = self._stamp_now()
            if stamp == self._stamp:
                return None
            try:
                renewed = self._read()
            except ConfigError as error:
                if not self._is_failing:
                    self._is_failing = True
                    consequence = "the certificates of before are used"
                    log_event(logger, "tls_not_renewed", level=logging.ERROR, problem=error, consequence=consequence)
                return None
            self._stamp, self._is_failing = stamp, False
            log_event(logger, "tls_renewed", path=self._cert)
            return renewed

    def _read(self) -> Any:
        cert, key = _data_of("access.tls_cert_file", self._cert), _data_of("access.tls_key_file", self._key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self._cert, self._key, password=_no_password)
        except (ssl.SSLError, OSError, ValueError) as exc:
            problem = (
                f"no certificate in PEM whose key is {self._key}, unencrypted ({exc}); give both files of one pair"
            )
            raise ConfigError("access.tls_cert_file", str(self._cert), "start", problem) from exc
        authorities = None
        if self._client_ca is not None:
            authorities = _data_of("access.client_ca_file", self._client_ca)
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=authorities.decode("ascii"))
            except (ssl.SSLError, ValueError) as exc:
                problem = f"no certificates in PEM ({exc}); give those of the authorities that sign for clients"
                raise ConfigError("access.client_ca_file", str(self._client_ca), "start", problem) from exc
        return grpc.ssl_server_certificate_configuration([(key, cert)], authorities)

    def _stamp_now(self) -> _Stamp:
        paths = [path for path in (self._cert, self._key, self._client_ca) if path is not None]
        return tuple(_stamp_of(path) for path in paths)


def _stamp_of(path: Path) -> tuple[int, ...]:
    try:
        facts = path.stat()  # of what a symbolic link leads to: Kubernetes renews secrets by changing the link
    except OSError:
        return ()
    return facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def _data_of(key: str, path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as exc:
        problem = f"cannot be read: {exc.strerror}; name a PEM file that uid and gid of the daemon may read"
        raise ConfigError(key, str(path), "start", problem) from exc
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(key, str(path), "start", f"has more than {MAX_FILE_BYTES} bytes; name a PEM file")
    return data


def _no_password() -> str:
    raise ValueError("the key has a password, and no one is there to give it")
