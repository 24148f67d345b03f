"""A pool in memory: everything is there until a test takes it away."""

from kvtier.errors import RemoteUnavailableError


class MemoryPool:
    """See RemotePool.

    Attributes:
        objects: What it holds, by key.
        down: Every call fails.
        num_calls: Made so far.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.down = False
        self.num_calls = 0

    @property
    def url(self) -> str:
        """See RemotePool."""
        return "memory://pool"

    async def get(self, key: str) -> bytes | None:
        """See RemotePool."""
        self._call()
        return self.objects.get(key)

    async def put(self, key: str, data: bytes) -> None:
        """See RemotePool."""
        self._call()
        self.objects.setdefault(key, data)

    async def delete(self, prefix: str) -> None:
        """See RemotePool."""
        self._call()
        self.objects = {key: data for key, data in self.objects.items() if not key.startswith(prefix)}

    async def close(self) -> None:
        """See RemotePool."""

    def _call(self) -> None:
        self.num_calls += 1
        if self.down:
            raise RemoteUnavailableError(self.url, "be asked", "it is down")
