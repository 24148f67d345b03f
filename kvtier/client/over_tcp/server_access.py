"""Where a daemon listens over TCP, and what a client shows it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import grpc

from kvtier.core.loopback import is_loopback_host
from kvtier.errors import ConnectionLostError, InvalidArgumentError, ServerUnreachableError

SERVER_VARIABLE, TOKEN_VARIABLE, TOKEN_FILE_VARIABLE = "KVTIER_SERVER", "KVTIER_TOKEN", "KVTIER_TOKEN_FILE"
CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE = "KVTIER_CA_FILE", "KVTIER_CLIENT_CERT_FILE", "KVTIER_CLIENT_KEY_FILE"
MAX_MESSAGE_BYTES = 256 * 1024**2
MAX_FILE_BYTES = 1024**2
_WITHHELD = "<withheld>"
_UNTRUSTED = ("CERTIFICATE_VERIFY_FAILED", "certificate verify failed", "certificate signature failure")
"""In what gRPC says of a certificate that is not trusted."""
_NOT_SENT = ("failed to connect", "errors resolving", "DNS resolution failed")
"""In what gRPC says of a call that it has not sent."""


class ServerLostError(ServerUnreachableError, ConnectionLostError):
    """A connection over TCP ended during a call: what came of the call is not known."""


@dataclass(frozen=True, kw_only=True)
class ServerAccess:
    """A daemon's address and the credentials for it.

    Attributes:
        server: `HOST:PORT`, or `[HOST]:PORT` for IPv6.
        token: Of `kvtier token create`; empty: none is sent.
        ca: PEM of the authorities that may have signed the daemon's certificate; None: those that gRPC knows.
        certificate: PEM of this client's certificate; None: it has none.
        key: PEM of its key.
    """

    server: str
    token: str = field(default="", repr=False)
    ca: bytes | None = field(default=None, repr=False)
    certificate: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)

    @property
    def uses_tls(self) -> bool:
        """Always beyond loopback; on it when an authority or a certificate is given."""
        return bool(self.ca or self.certificate) or not is_loopback_host(_host_of(self.server))

    def channel(self) -> grpc.Channel:
        """Return a channel, which the caller closes; nothing is sent yet."""
        options = (
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1),
        )
        if not self.uses_tls:
            return grpc.insecure_channel(self.server, options=options)
        credentials = grpc.ssl_channel_credentials(self.ca, self.key, self.certificate)
        return grpc.secure_channel(self.server, credentials, options=options)

    def metadata(self) -> tuple[tuple[str, str], ...] | None:
        """Return what each call sends beside its message."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else None

    def unreachable(self, details: str) -> ServerUnreachableError:
        """Return the error for what gRPC says of a connection that cannot be made, or was lost: ServerLostError."""
        problem, remedy = details[-300:] or "the connection was closed", "check the address, and the daemon's log"
        if "Connection refused" in details:
            problem, remedy = "no process listens there", "check server.listen of the daemon, and the port"
        elif any(text in details for text in _UNTRUSTED):
            problem = "its certificate is not signed by an authority that this client trusts, or is over"
            remedy = "name the authority's certificate: --ca-file (ca_file)"
        elif "Hostname Verification Check failed" in details or "not match" in details:
            problem = "its certificate is for another host name"
            remedy = "use the name that stands in it"
        elif not self.uses_tls:
            remedy = "if the daemon has TLS there, name its authority: --ca-file (ca_file)"
        elif "Socket closed" in details or "reset" in details or "handshake" in details.lower():
            problem = f"it ended the TLS handshake ({problem})"
            remedy = (
                "it may ask for a client certificate (--client-cert-file, --client-key-file), have no TLS there, or "
                "have as many connections as it takes"
            )
        # With TLS 1.3 a daemon that refuses the client's certificate ends the connection behind the first call, too.
        kind = ServerUnreachableError if any(text in details for text in _NOT_SENT) else ServerLostError
        return kind(self.server, problem, remedy)


def make_server_access(
    server: str,
    *,
    token: str | None = None,
    token_file: Path | str | None = None,
    ca_file: Path | str | None = None,
    client_cert_file: Path | str | None = None,
    client_key_file: Path | str | None = None,
    environ: Mapping[str, str] = os.environ,
    names: Mapping[str, str] | None = None,
) -> ServerAccess:
    """Check and read what is given, else what the environment names.

    Args:
        server: `HOST:PORT`.
        token: Itself; else it is read from the file, `$KVTIER_TOKEN` or the file that `$KVTIER_TOKEN_FILE` names.
        token_file: See above; surrounding white space does not count.
        ca_file: PEM files, these three; see `ServerAccess`.
        client_cert_file: See above.
        client_key_file: See above.
        environ: The variables that stand for what is not given.
        names: What errors call these arguments.

    Raises:
        InvalidArgumentError: One cannot be used. It never shows the token.
    """
    called = names if names is not None else {}

    def name(field: str) -> str:
        return called.get(field, field)

    def read(field: str, path: Path | str | None, variable: str) -> bytes | None:
        path = path or environ.get(variable)
        return None if not path else _contents(name(field), Path(path))

    _check_address(name("server"), server)
    if token is None and token_file is None and environ.get(TOKEN_VARIABLE):
        token = environ[TOKEN_VARIABLE]
    is_in_file = token is None
    if token is None and (data := read("token_file", token_file, TOKEN_FILE_VARIABLE)) is not None:
        token = data.decode("utf-8", "replace").strip()
    if token is not None and not _is_word(token):
        remedy = "a token is one word, as `kvtier token create` printed it"
        raise InvalidArgumentError(name("token_file" if is_in_file else "token"), _WITHHELD, remedy)
    certificate, key = (
        read("client_cert_file", client_cert_file, CERT_VARIABLE),
        read("client_key_file", client_key_file, KEY_VARIABLE),
    )
    if (certificate is None) != (key is None):
        missing = "client_key_file" if key is None else "client_cert_file"
        raise InvalidArgumentError(name(missing), None, "a client certificate and its key go together; give both")
    ca = read("ca_file", ca_file, CA_VARIABLE)
    return ServerAccess(server=server, token=token or "", ca=ca, certificate=certificate, key=key)


def _is_word(token: str) -> bool:
    return token.isascii() and token.isprintable() and " " not in token and 0 < len(token) <= 256


def _contents(field: str, path: Path) -> bytes:
    try:
        with path.expanduser().open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, RuntimeError, ValueError) as exc:
        why = getattr(exc, "strerror", None) or str(exc)
        raise InvalidArgumentError(field, str(path), f"cannot be read: {why}; name another file") from exc
    if len(data) > MAX_FILE_BYTES:
        raise InvalidArgumentError(field, str(path), f"has more than {MAX_FILE_BYTES} bytes; name another file")
    return data


def _check_address(field: str, server: str) -> None:
    remedy = 'must be HOST:PORT, like "cache-1.example.com:7464" or "[::1]:7464"'
    try:
        parts = urlsplit(f"//{server}")
        is_address = bool(parts.hostname) and bool(parts.port) and parts.netloc == server and "@" not in server
        server.encode("ascii")
    except ValueError as exc:
        raise InvalidArgumentError(field, server, remedy) from exc
    if not is_address or not server.isprintable() or " " in server:
        raise InvalidArgumentError(field, server, remedy)


def _host_of(server: str) -> str:
    return urlsplit(f"//{server}").hostname or ""
