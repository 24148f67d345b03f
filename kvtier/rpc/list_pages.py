"""Lists in pages: bounded in messages and in bytes, with nothing kept between two of them."""

from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

from google.protobuf.message import Message

MAX_PAGE_SIZE = 1000
PAGE_BYTES = 64 * 1024
"""A page is put together and serialized in one turn of the loop; longer ones took several milliseconds."""

M = TypeVar("M", bound=Message)


def page_size(requested: int) -> int:
    """Return the largest number of messages on a page; 0 is a client without a preference."""
    return min(requested or MAX_PAGE_SIZE, MAX_PAGE_SIZE)


async def fill_page(messages: AsyncIterator[tuple[str, M]], max_messages: int) -> tuple[Sequence[M], str]:
    """Take messages for one page; return them, and the token of the next page, which is empty after the last.

    A token is the name of the last message listed (https://google.aip.dev/158), so the daemon keeps nothing between two
    pages. Rejected: one stream. A client that stops in the middle would hold it open.

    Args:
        messages: Each with its name, from the first that belongs on the page, and one more if there is a next page.
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
