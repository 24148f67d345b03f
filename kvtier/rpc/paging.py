"""Pages of lists, as https://google.aip.dev/158 has them: bounded in number and in bytes, so that no list is too long.

A token is the name of the last one listed: the daemon keeps nothing between two pages, and what comes or goes meanwhile
moves nobody else from one page to another. Rejected: one stream. A client that stops in the middle would hold it open,
and it needs a deadline for all of it instead of one for each page.
"""

from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

from google.protobuf.message import Message

MAX_PAGE_SIZE = 1000
PAGE_BYTES = 1024**2

M = TypeVar("M", bound=Message)


def page_size(asked: int) -> int:
    """Return how many a page has at most; 0 is the client that does not care."""
    return min(asked or MAX_PAGE_SIZE, MAX_PAGE_SIZE)


async def fill_page(messages: AsyncIterator[tuple[str, M]], max_messages: int) -> tuple[Sequence[M], str]:
    """Take messages for one page; return them, and the token of the next page, which is empty after the last.

    Args:
        messages: Each with its name, from the first that belongs on the page; one more than `max_messages` says that
            there is a next page.
        max_messages: See `page_size`.
    """
    taken: list[M] = []
    last, num_bytes = "", 0
    async for name, message in messages:
        num_bytes += message.ByteSize()
        if taken and (len(taken) == max_messages or num_bytes > PAGE_BYTES):
            return taken, last
        taken.append(message)
        last = name
    return taken, ""
