"""The files of the daemon's TLS: read and checked at the start, and again when they have changed."""

import logging
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.obs.log import log_event

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 1024**2

_Stamp = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class TlsData:
    """What the files hold, in PEM; `authorities`: of clients, None if they need no certificate."""

    certificate: bytes
    key: bytes
    authorities: bytes | None


class TlsFiles:
    """Certificate, key, and the authorities of clients, for one server. Any thread: gRPC asks in that of a handshake.

    Files that are being renewed may not fit together for a moment: then what was read before is used, and the next
    look sees to it.

    Attributes:
        data: What was read last.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None = None) -> None:
        """Read the files. Blocks.

        Raises:
            ConfigError: One cannot be used; it names the setting.
        """
        self.cert, self.key, self.client_ca = cert, key, client_ca
        self._lock = threading.Lock()  # protects what follows
        self._stamp = self._stamp_now()
        self._is_failing = False
        self.data = self._read()

    def renewed(self) -> TlsData | None:
        """Return new data, None if the files are as they were or cannot be used now. Blocks."""
        with self._lock:
            stamp = self._stamp_now()
            if stamp == self._stamp:
                return None
            try:
                self.data = self._read()
            except ConfigError as error:
                if not self._is_failing:
                    self._is_failing = True
                    consequence = "the certificates of before are used"
                    log_event(logger, "tls_not_renewed", level=logging.ERROR, problem=error, consequence=consequence)
                return None
            self._stamp, self._is_failing = stamp, False
            log_event(logger, "tls_renewed", path=self.cert)
            return self.data

    def _read(self) -> TlsData:
        cert, key = _data_of("access.tls_cert_file", self.cert), _data_of("access.tls_key_file", self.key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.cert, self.key, password=_no_password)
        except (ssl.SSLError, OSError, ValueError) as exc:
            problem = f"no certificate in PEM whose key is {self.key}, unencrypted ({exc}); give both files of one pair"
            raise ConfigError("access.tls_cert_file", str(self.cert), "start", problem) from exc
        authorities = None
        if self.client_ca is not None:
            authorities = _data_of("access.client_ca_file", self.client_ca)
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=authorities.decode("ascii"))
            except (ssl.SSLError, ValueError) as exc:
                problem = f"no certificates in PEM ({exc}); give those of the authorities that sign for clients"
                raise ConfigError("access.client_ca_file", str(self.client_ca), "start", problem) from exc
        return TlsData(certificate=cert, key=key, authorities=authorities)

    def _stamp_now(self) -> _Stamp:
        paths = [path for path in (self.cert, self.key, self.client_ca) if path is not None]
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
