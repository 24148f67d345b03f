"""Which hosts are this one, reached by no other."""

import ipaddress


def is_loopback_host(host: str) -> bool:
    """Return whether a name or an address, without a port and brackets, leads to this host only.

    Names but `localhost` may lead anywhere.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
