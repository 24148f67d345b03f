"""Which addresses, TLS files and `access.auth` go together; what does not, keeps the daemon from starting (ADR 38)."""

from collections.abc import Callable, Mapping

from kvtier.config.model import OFF, AccessConfig
from kvtier.config.units import is_loopback


def check_access(
    access: AccessConfig, listen: Mapping[str, str], http_listen: str, report: Callable[[str, str], None]
) -> None:
    """Report what would let others in, or read along.

    Args:
        access: As it was set.
        listen: Addresses that take calls, by their setting; `off` or `host:port`.
        http_listen: Of HTTP; beyond loopback without TLS it has no API, and metrics are for everyone.
        report: Called with the setting and its problem, which names the remedy.
    """
    if (access.tls_cert_file is None) != (access.tls_key_file is None):
        present, missing = ("cert", "key") if access.tls_key_file is None else ("key", "cert")
        report(f"access.tls_{missing}_file", f"is missing: access.tls_{present}_file is set, and TLS needs both")
    if access.client_ca_file is not None and access.tls_cert_file is None:
        report("access.client_ca_file", "needs TLS: set access.tls_cert_file and access.tls_key_file, too")
    if access.auth == "none" and http_listen != OFF and not is_loopback(http_listen):
        report("access.auth", _open_to_all("http.listen", http_listen))
    for key, address in listen.items():
        if address == OFF or is_loopback(address):
            continue
        if access.tls_cert_file is None:
            remedy = "set access.tls_cert_file and access.tls_key_file, or name a loopback address (127.0.0.1:PORT)"
            report(key, f"other hosts reach this address, and tokens would be sent unencrypted; {remedy}")
        if access.auth == "none":
            report("access.auth", _open_to_all(key, address))


def _open_to_all(key: str, address: str) -> str:
    remedy = 'name a loopback address (127.0.0.1:PORT), or set access.auth = "token"'
    return f"other hosts reach {key} = {address}, and would need no credentials; {remedy}"
