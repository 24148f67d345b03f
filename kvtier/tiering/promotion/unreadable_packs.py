"""What the log says of chunks that cannot be read: a line for each pack, not for each chunk of each request."""

import logging

from kvtier.core.stored import StoredChunk
from kvtier.errors import ArenaError, TierIOError
from kvtier.obs.log import log_event
from kvtier.tiering.promotion.batch import Read

logger = logging.getLogger(__name__)

_MAX_PACKS = 10_000
_NO_MEMORY = ""
"""In place of a pack, of chunks that get no pages."""

_Problem = tuple[str, int | None]
"""A pack, and the system's number of the error."""


class UnreadablePacks:
    """Says that chunks of a pack cannot be read, and not again until one of its chunks was read. Loop thread only.

    What is kept is bounded: the oldest go, and would be said again.
    """

    def __init__(self) -> None:
        self._failed: dict[_Problem, list[tuple[Read, str]]] = {}  # not said yet
        self._said: dict[str, set[int | None]] = {}

    def failed(self, read: Read, error: TierIOError | ArenaError) -> None:
        """Note a failure; `say` logs it."""
        problem = (read.stored.pack_id, error.errno) if isinstance(error, TierIOError) else (_NO_MEMORY, None)
        self._failed.setdefault(problem, []).append((read, str(error)))

    def was_read(self, stored: StoredChunk) -> None:
        """Its pack can be read, and there is memory."""
        if self._said:
            self._said.pop(stored.pack_id, None)
            self._said.pop(_NO_MEMORY, None)

    def say(self) -> None:
        """Log what was noted since the last call, and is new."""
        failed, self._failed = self._failed, {}
        for (pack_id, number), failures in failed.items():
            if number in self._said.get(pack_id, ()):
                continue
            if len(self._said) >= _MAX_PACKS and pack_id not in self._said:
                del self._said[next(iter(self._said))]
            self._said.setdefault(pack_id, set()).add(number)
            read, problem = failures[0]
            log_event(
                logger,
                "chunk_unreadable",
                level=logging.WARNING,
                key=read.key.hex(),
                chunks=len(failures),
                problem=problem,
            )
