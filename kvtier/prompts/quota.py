"""Whether what is pinned fits on disk: bytes that pinned prompts take there now, or will take."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kvtier.concurrency.turns import Breather, slices
from kvtier.config.model import OwnersConfig
from kvtier.core.layout import KVLayout
from kvtier.errors import OwnerQuotaError, QuotaExceededError
from kvtier.ledger import PromptRow
from kvtier.prompts.book import PromptBook
from kvtier.prompts.planned_pins import PlannedPin
from kvtier.tiering.namespace import Namespace


async def check_quota(
    book: PromptBook,
    namespaces: Mapping[str, Namespace],
    prompts: Sequence[PromptRow],
    limit_bytes: int,
    *,
    ending: Collection[str] = (),
) -> None:
    """Refuse prompts that, with all pinned ones, would not fit on disk in the namespaces that engines use now.

    The estimate counts uncompressed bytes for what is not on disk yet, so it errs towards refusing. A pin that stands
    already takes no more than it has.

    Args:
        ending: Names of pins that end with it.

    Raises:
        QuotaExceededError: With the numbers.
    """
    new = [each for each in prompts if (known := book.by_pin_id(each.pin_id)) is None or not known.pinned]
    besides = {*ending, *(prompt.name for prompt in new)}
    for namespace in list(namespaces.values()):
        if not namespace.live or namespace.ephemeral:
            continue
        wanted = [prompt for prompt in new if is_served(namespace, prompt)]
        if not wanted:
            continue
        needed_bytes = sum(bytes_of_tokens(namespace.layout, len(prompt.tokens)) for prompt in wanted)
        applies = partial(is_served, namespace)
        used_bytes = await pinned_bytes(namespace, book, besides=besides, applies=applies)
        if needed_bytes + used_bytes > limit_bytes:
            name = max(wanted, key=lambda prompt: len(prompt.tokens)).name
            raise QuotaExceededError(name, needed_bytes, used_bytes, limit_bytes, namespace.namespace_id)


async def check_owner_quotas(
    book: PromptBook,
    namespaces: Mapping[str, Namespace],
    owners: OwnersConfig,
    plans: Iterable[PlannedPin],
    ending: Iterable[PromptRow] = (),
) -> None:
    """Refuse pins by which an owner would have more than its quota; with turns of the loop in between.

    Versions that are to replace a pin count beside it, as they do on disk. What an owner has already too much of
    refuses nothing that adds no more of it.

    Args:
        ending: Pins that end with it.

    Raises:
        OwnerQuotaError: With the numbers.
    """
    pairs: list[tuple[PromptRow | None, PromptRow | None]]
    pairs = [(plan.old if plan.old is not None and plan.old.pinned else None, plan.prompt) for plan in plans]
    pairs += [(prompt, None) for prompt in ending]
    limits = {after.owner: owners.of(after.owner).limits() for _, after in pairs if after is not None and after.owner}
    limits = {owner: limit for owner, limit in limits.items() if limit}
    if not limits:
        return
    layouts = {namespace.model: namespace.layout for namespace in namespaces.values()}
    used = await _usage_by_owner(book.pinned(), layouts)
    removed = await _usage_by_owner([old for old, _ in pairs if old is not None], layouts)
    added = await _usage_by_owner([new for _, new in pairs if new is not None], layouts)
    for owner, fields in sorted(limits.items()):
        for field, limit in fields.items():
            before, gone, new = (getattr(usage.get(owner, Usage()), field) for usage in (used, removed, added))
            if new > gone and before - gone + new > limit:
                raise OwnerQuotaError(owner, field.removeprefix("num_"), new - gone, before, limit)


async def _usage_by_owner(prompts: Iterable[PromptRow], layouts: Mapping[str, KVLayout]) -> dict[str, "Usage"]:
    """Add up what operators' prompts take; of an unknown model as many bytes as of that which takes most."""
    breather, usages = Breather(), dict[str, Usage]()
    for prompt in prompts:
        await breather.pause()
        if prompt.origin in ("named", "replacement") and prompt.owner:
            num_tokens, layout = len(prompt.tokens), layouts.get(prompt.model)
            candidates = [layout] if layout is not None else layouts.values()
            num_bytes = max((bytes_of_tokens(each, num_tokens) for each in candidates), default=0)
            usages.setdefault(prompt.owner, Usage()).add(num_tokens, num_bytes)
    return usages


@dataclass(kw_only=True)
class Usage:
    """What prompts take: pins, tokens, and uncompressed bytes where the layout of their model is known."""

    num_pins: int = 0
    num_tokens: int = 0
    num_bytes: int = 0

    def add(self, num_tokens: int, num_bytes: int) -> None:
        """Count one more."""
        self.num_pins += 1
        self.num_tokens += num_tokens
        self.num_bytes += num_bytes


def bytes_of_tokens(layout: KVLayout, num_tokens: int) -> int:
    """Return how many uncompressed bytes the reachable chunks of a prompt of this length take."""
    return sum(group.reachable_chunks(num_tokens) * layout.payload_bytes(group.group_idx) for group in layout.groups)


async def pinned_bytes(
    namespace: Namespace,
    book: PromptBook,
    *,
    besides: Collection[str],
    applies: Callable[[PromptRow], bool] = lambda prompt: True,
) -> int:
    """Return bytes that pinned prompts take on disk in a namespace now, or will take.

    What is bound is added up as it changes; what is not bound yet, and will be where `applies`, is estimated here, in
    slices with turns of the loop between them. Prompts that are named in `besides` do not count.
    """
    own_id, num_bytes = namespace.namespace_id, 0
    for part in slices(book.pinned()):
        for prompt in part:
            if prompt.name not in besides and book.binding(prompt.pin_id, own_id) is None and applies(prompt):
                num_bytes += bytes_of_tokens(namespace.layout, len(prompt.tokens))
        await asyncio.sleep(0)
    besides_bytes = sum([await _bound_bytes(namespace, book, name) for name in besides])
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
