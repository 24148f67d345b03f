"""TLS of the HTTP server: a context whose certificate is read again when its files have changed."""

import asyncio
import logging
import ssl
from pathlib import Path

from kvtier.obs.log import log_event

logger = logging.getLogger(__name__)

CHECK_S = 5.0


class TlsSource:
    """Certificate, key, and the authorities of clients, as paths. Any thread."""

    def __init__(self, cert: Path, key: Path, client_ca: Path | None = None) -> None:
        """Read the files. ssl.SSLError, OSError: one cannot be used."""
        self._cert, self._key = cert, key
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.context.load_cert_chain(cert, key)
        if client_ca is not None:
            # Asked for and not required: probes and scrapes have none. The API asks for a token then.
            self.context.verify_mode = ssl.CERT_OPTIONAL
            self.context.load_verify_locations(client_ca)
        self._stamp = self._stamp_now()

    async def keep_fresh(self) -> None:
        """Read the files again when they have changed, for ever; handshakes from then on use them."""
        while True:
            await asyncio.sleep(CHECK_S)
            await asyncio.to_thread(self.refresh)

    def refresh(self) -> None:
        """Read the files again if they have changed; if they do not fit together, look again next time. Blocks."""
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self._cert, self._key)
            self.context.load_cert_chain(self._cert, self._key)
        except (ssl.SSLError, OSError) as error:
            consequence = "the certificate of before is used"
            log_event(logger, "tls_not_renewed", level=logging.ERROR, problem=error, consequence=consequence)
        else:
            log_event(logger, "tls_renewed", path=self._cert)
        self._stamp = stamp

    def _stamp_now(self) -> tuple[tuple[int, int, int], ...]:
        return tuple(_stamp_of(path) for path in (self._cert, self._key))


def _stamp_of(path: Path) -> tuple[int, int, int]:
    try:
        facts = path.stat()
    except OSError:
        return 0, 0, 0
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


def common_name(certificate: object) -> str:
    """Return the common name of a certificate as `SSLSocket.getpeercert` gives it; empty: it has none, or several."""
    subject = certificate.get("subject", ()) if isinstance(certificate, dict) else ()
    names = [value for parts in subject for name, value in parts if name == "commonName"]
    return names[0] if len(names) == 1 else ""
