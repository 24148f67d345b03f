"""Which callers vLLM refuses: inside vLLM this app sees a request before vLLM has looked at its API key.

A long body of a caller without a key would be held and parsed, and vLLM would not even have read it.
"""

import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable

from kvtier.gateway.asgi import App, Scope, get_status, header

UNCHECKED_BYTES = 64 * 1024
"""Bodies up to here are read first: they cost less than the question."""
MAX_AGE_S = 60.0
MAX_KEYS = 1024
_PATH = "/v1/models"


class RefusedKeys:
    """Asks vLLM about a key once a minute. One event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[bytes, tuple[bool, float]] = OrderedDict()

    async def refuse(self, app: App, scope: Scope) -> bool:
        """Return whether vLLM will answer 401 to a request with a long body, or with one of unknown length."""
        length = header(scope["headers"], b"content-length")
        is_announced = length.isdigit() and not header(scope["headers"], b"transfer-encoding")
        if is_announced and int(length) <= UNCHECKED_BYTES:
            return False
        key = hashlib.sha256(header(scope["headers"], b"authorization")).digest()
        is_refused, until_s = self._known.get(key, (False, -math.inf))
        if until_s < self._clock():
            is_refused = await get_status(app, scope, f"{scope.get('root_path', '')}{_PATH}") == 401
            self._known[key] = is_refused, self._clock() + MAX_AGE_S
        self._known.move_to_end(key)
        if len(self._known) > MAX_KEYS:
            self._known.popitem(last=False)
        return is_refused
