"""Whether what is pinned fits on disk: bytes that pinned prompts take there now, or will take."""

import asyncio
from collections.abc import Callable, Mapping

from kvtier.concurrency.turns import slices
from kvtier.core.layout import KVLayout
from kvtier.errors import QuotaExceededError
from kvtier.ledger import PromptRow
from kvtier.prompts.book import PromptBook
from kvtier.tiering.namespace import Namespace


async def check_quota(
    book: PromptBook, namespaces: Mapping[str, Namespace], prompt: PromptRow, limit_bytes: int
) -> None:
    """Refuse a prompt that, with all pinned prompts, would not fit on disk in the namespaces that engines use now.

    The estimate counts uncompressed bytes for what is not on disk yet, so it errs towards refusing.

    Raises:
        QuotaExceededError: With the numbers.
    """
    for namespace in list(namespaces.values()):
        if not namespace.live or namespace.ephemeral:
            continue
        serving = [session for session in namespace.sessions if session.serves(prompt)]
        if not serving:
            continue
        needed_bytes = bytes_of_tokens(namespace.layout, len(prompt.tokens))
        used_bytes = await pinned_bytes(namespace, book, besides=prompt.name, applies=serving[0].serves)
        if needed_bytes + used_bytes > limit_bytes:
            raise QuotaExceededError(prompt.name, needed_bytes, used_bytes, limit_bytes, namespace.namespace_id)


def bytes_of_tokens(layout: KVLayout, num_tokens: int) -> int:
    """Return how many uncompressed bytes the reachable chunks of a prompt of this length take."""
    total = 0
    for group in layout.groups:
        num_chunks = num_tokens // group.chunk_tokens
        if group.window_chunks:
            num_chunks = min(num_chunks, group.window_chunks)
        total += num_chunks * layout.payload_bytes(group.group_idx)
    return total


async def pinned_bytes(
    namespace: Namespace, book: PromptBook, *, besides: str, applies: Callable[[PromptRow], bool] = lambda prompt: True
) -> int:
    """Return bytes that pinned prompts take on disk in a namespace now, or will take.

    What is bound is added up as it changes; what is not bound yet, and will be where `applies`, is estimated here, in
    slices with turns of the loop between them. The prompt that is named `besides` does not count.
    """
    own_id, num_bytes = namespace.namespace_id, 0
    for part in slices(book.pinned()):
        for prompt in part:
            if prompt.name != besides and book.binding(prompt.pin_id, own_id) is None and applies(prompt):
                num_bytes += bytes_of_tokens(namespace.layout, len(prompt.tokens))
        await asyncio.sleep(0)
    besides_bytes = await _bound_bytes(namespace, book, besides)
    return num_bytes + namespace.table.disk.promised_bytes - besides_bytes


async def bytes_of_pin(namespace: Namespace, book: PromptBook, prompt: PromptRow) -> int:
    """Return what of `pinned_bytes` would not be there without this pin."""
    if book.binding(prompt.pin_id, namespace.namespace_id) is not None:
        return await _bound_bytes(namespace, book, prompt.name)
    return bytes_of_tokens(namespace.layout, len(prompt.tokens)) if is_served(namespace, prompt) else 0


def is_served(namespace: Namespace, prompt: PromptRow) -> bool:
    """Say whether an engine of the namespace recognizes the prompt, bound or not."""
    return any(session.serves(prompt) for session in namespace.sessions)


async def _bound_bytes(namespace: Namespace, book: PromptBook, name: str) -> int:
    """Return what one prompt's part of `promised_bytes` is."""
    prompt = book.find(name)
    binding = book.binding(prompt.pin_id, namespace.namespace_id) if prompt is not None and prompt.pinned else None
    num_bytes = 0
    for part in slices(binding.keys if binding is not None else ()):
        num_bytes += sum(map(namespace.table.disk.needed_bytes, namespace.table.known(part)))
        await asyncio.sleep(0)
    return num_bytes
