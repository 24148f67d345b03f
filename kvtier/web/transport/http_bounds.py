"""How much a client over HTTP may take, and for how long."""

from dataclasses import dataclass

MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class HttpBounds:
    """Bounds of the server. No settings: fields, so that tests can vary them."""

    max_connections: int = 256
    """More than browsers, scrapes and scripts of a host need; a tenth of the usual limit of open files."""
    max_event_streams: int = 64
    """As many as the daemon lets watch events (`kvtier.rpc.cache_servicer`)."""
    max_calls: int = 32
    """Calls of the API at a time: each has a thread."""
    max_transfers: int = 4
    """Bundles up and down at a time, beside the calls: each is as slow as its client."""
    max_probes: int = 8
    """Scrapes and probes at a time, beside the calls."""
    max_body_bytes: int = 32 * MIB
    """Of a request: a prompt of two million tokens as JSON. Bundles are streamed, and have no bound but the disk's."""
    max_header_bytes: int = 64 * 1024
    """Of a request, all headers together."""
    header_timeout_s: float = 10.0
    """From a connection, or from the first byte of its next request, to the end of the headers; a TLS handshake has
    as long before."""
    body_timeout_s: float = 30.0
    """Without a byte of the body, while the server waits for one."""
    read_timeout_s: float = 30.0
    """Without the client having taken a byte, while some wait for it."""
    idle_timeout_s: float = 5.0
    """Between two requests of a connection. A scrape a minute connects again, which takes a millisecond on a LAN."""
    sweep_s: float = 1.0
    """Between two looks at the connections: the resolution of the times above."""
    keep_alive_s: float = 15.0
    """Between two comments in a stream without events: proxies end a silent one after 30 s or more."""
    max_waiting_events: int = 256
    """Of one stream; then the oldest are lost."""


def share_of(most: int) -> int:
    """Return how many of the places one grant may take: a caller that leaves a call leaves it running for an hour."""
    return max(1, most // 4)
