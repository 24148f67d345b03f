"""TLS of the HTTP server: a context whose certificate is read again when its files have changed."""

import asyncio
import ssl
from contextlib import suppress

from kvtier.access.tls_files import TlsFiles
from kvtier.concurrency.thread_calls import begin_in_thread

CHECK_S = 5.0


class TlsSource:
    """A context over certificates in files. Authorities of clients are those of the start."""

    def __init__(self, files: TlsFiles) -> None:
        """Take files, which are this server's own."""
        self._files, self._is_behind = files, False
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.context.load_cert_chain(files.cert, files.key)
        if files.client_ca is not None:
            # Asked for and not required: probes and scrapes have none. The API asks for a token then.
            self.context.verify_mode = ssl.CERT_OPTIONAL
            self.context.load_verify_locations(files.client_ca)

    async def keep_fresh(self) -> None:
        """Use new certificates for the handshakes from then on, for ever."""
        while True:
            await asyncio.sleep(CHECK_S)
            # Not `to_thread`, whose threads the loop's end waits for: the file system may hang.
            await begin_in_thread("kvtier-http-tls", self.refresh)

    def refresh(self) -> None:
        """Use new certificates, if there are some. Blocks."""
        self._is_behind |= self._files.renewed() is not None
        if self._is_behind:
            with suppress(OSError):  # they change again just now
                self.context.load_cert_chain(self._files.cert, self._files.key)
                self._is_behind = False


def common_name(certificate: object) -> str:
    """Return the common name of a certificate as `SSLSocket.getpeercert` gives it; empty: it has none, or several."""
    subject = certificate.get("subject", ()) if isinstance(certificate, dict) else ()
    names = [value for parts in subject for name, value in parts if name == "commonName"]
    return names[0] if len(names) == 1 else ""
