"""How often: wrong credentials of an address, calls of a caller. Tables of bounded size; time is an argument."""

import ipaddress
import threading
from collections import OrderedDict
from dataclasses import dataclass

MAX_WRONG = 20
WINDOW_S = 60.0
CALLS_PER_S = 100.0
BURST_CALLS = 200.0
MAX_KEPT = 4096
"""Addresses, and callers: those seen last. An attacker with more addresses than that is slowed by nothing here; what
it tries to guess has 256 bits."""


@dataclass
class _Wrong:
    began_s: float
    num: int = 0


@dataclass
class _Bucket:
    at_s: float
    calls: float = BURST_CALLS


class WrongCredentials:
    """Counts refused credentials by address. Any thread.

    Right credentials are never counted nor refused, or one host behind an address could lock out the others.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects the table
        self._by_address: OrderedDict[str, _Wrong] = OrderedDict()

    def add(self, address: str, now_s: float) -> bool:
        """Count one; return whether the address has sent too many: it is answered so for a minute after the last."""
        key = network_of(address)
        with self._lock:
            known = self._by_address.pop(key, None)
            if known is None or now_s - known.began_s >= WINDOW_S:
                known = _Wrong(now_s)
            known.num += 1
            if is_too_many := known.num > MAX_WRONG:
                known.began_s = now_s
            self._by_address[key] = known
            while len(self._by_address) > MAX_KEPT:
                self._by_address.popitem(last=False)
            return is_too_many

    def __len__(self) -> int:
        return len(self._by_address)


class CallRates:
    """A token bucket for each caller. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects the table
        self._by_caller: OrderedDict[str, _Bucket] = OrderedDict()

    def take(self, caller: str, now_s: float) -> bool:
        """Count a call; return whether it may be made."""
        with self._lock:
            bucket = self._by_caller.pop(caller, None) or _Bucket(now_s)
            bucket.calls = min(BURST_CALLS, bucket.calls + (now_s - bucket.at_s) * CALLS_PER_S)
            bucket.at_s = now_s
            if may := bucket.calls >= 1:
                bucket.calls -= 1
            self._by_caller[caller] = bucket
            while len(self._by_caller) > MAX_KEPT:
                self._by_caller.popitem(last=False)
            return may

    def __len__(self) -> int:
        return len(self._by_caller)


def network_of(address: str) -> str:
    """Return what one sender can choose freely in: an IPv4 address, the first 64 bits of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address[:64]
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((int(parsed), 64), strict=False))
    return str(parsed)
