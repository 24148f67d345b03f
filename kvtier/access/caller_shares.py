"""Places for what lasts, such as calls, watches and bytes: each caller has a share, so that none takes those of all."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvtier.errors import KvtierError, TooManyCallsError


class CallerShares:
    """Of one loop; not for other threads."""

    def __init__(self, what: str, most: int, most_each: int, error: type[KvtierError] = TooManyCallsError) -> None:
        """Allow `most` at a time, and `most_each` of them to one caller.

        Args:
            what: For people, in the plural and with its verb: "calls run over HTTP".
            most: Places.
            most_each: A caller's share of them.
            error: Raised without a place; takes its message.
        """
        self._what, self._most, self._most_each, self._error = what, most, most_each, error
        self._held: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._held.total()

    def take(self, caller: str, num: int = 1) -> None:
        """Take places for a caller, by what tells it from others; empty: it is like all others, and has no share.

        Raises:
            KvtierError: The `error`; nothing was taken.
        """
        remedy = "no more may; try again when one has ended"
        if caller and self._held[caller] + num > self._most_each:
            raise self._error(f"{self._most_each} {self._what} for this caller, and {remedy}, or end one")
        if len(self) + num > self._most:
            raise self._error(f"{self._most} {self._what}, and {remedy}")
        self._held[caller] += num

    def free(self, caller: str, num: int = 1) -> None:
        """Free places that were taken for a caller."""
        self._held[caller] -= num
        if not self._held[caller]:
            del self._held[caller]

    @contextmanager
    def holding(self, caller: str) -> Iterator[None]:
        """Hold a place during the block; see `take`."""
        self.take(caller)
        try:
            yield
        finally:
            self.free(caller)

    @contextmanager
    def taking(self, caller: str) -> Iterator[Callable[[int], None]]:
        """Yield what takes more places, as `take` does; all of them are freed behind the block."""
        taken = 0

        def take(num: int) -> None:
            nonlocal taken
            self.take(caller, num)
            taken += num

        try:
            yield take
        finally:
            self.free(caller, taken)
