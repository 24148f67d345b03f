"""What automatic pins take on disk, over all namespaces, and how much they may."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from kvtier.concurrency.turns import Breather, slices
from kvtier.core.layout import ChunkKey
from kvtier.discovery.choices import STAY, PrefixChoice, Selection, Verdict
from kvtier.discovery.traffic_book import namespace_of
from kvtier.prompts.book import PromptBook
from kvtier.prompts.quota import bytes_of_tokens
from kvtier.tiering.namespace import Namespace
from kvtier.tiering.resources import Resources

_SAMPLED_PACKS = 64


class BudgetReading(NamedTuple):
    """At one moment, in bytes."""

    used_bytes: int
    limit_bytes: int

    def fits(self, num_bytes: int) -> bool:
        """Say whether so much more is within the limit."""
        return self.used_bytes + num_bytes <= self.limit_bytes


class PinBudget:
    """`cache.auto_pin_max_bytes`, or what other pins leave of the disk if that is less. Loop thread only.

    A pin counts in each namespace where it is bound; a chunk that another pin has too costs automatic ones nothing.

    Args:
        resources: Configuration.
        prompts: All prompts.
        namespaces: By id; they come and go.
    """

    def __init__(self, resources: Resources, prompts: PromptBook, namespaces: Mapping[str, Namespace]) -> None:
        self._prompts, self._namespaces = prompts, namespaces
        self._max_bytes = resources.config.cache.auto_pin_max_bytes
        self._disk_bytes = resources.config.disk.disk_bytes

    def is_any_refused(self) -> bool:
        """Say whether the disk had no place for a chunk that is pinned."""
        return any(each.write_back.queue.num_refused for each in self._namespaces.values())

    def _promised_bytes(self) -> int:
        return sum(each.table.disk.promised_bytes for each in self._namespaces.values() if not each.ephemeral)

    async def limit_bytes(self) -> int:
        """Return what automatic pins may take."""
        if self._promised_bytes() + self._max_bytes <= self._disk_bytes:
            return self._max_bytes
        return (await self.reading()).limit_bytes

    async def reading(self) -> BudgetReading:
        """Count what automatic pins take, with turns of the loop in between."""
        promised_bytes = bound_bytes = unbound_bytes = 0  # promised: a chunk counts once for each pin
        for namespace in [each for each in self._namespaces.values() if not each.ephemeral]:
            num_pins, unbound_tokens = await self._pins_in(namespace)
            for part in slices(list(num_pins)):
                for chunk in namespace.table.known(part):
                    needed_bytes = namespace.table.disk.needed_bytes(chunk)
                    promised_bytes += num_pins[chunk.key] * needed_bytes
                    bound_bytes += needed_bytes if chunk.num_pins <= num_pins[chunk.key] else 0
                await asyncio.sleep(0)
            lengths = sum(bytes_of_tokens(namespace.layout, each) for each in unbound_tokens)
            unbound_bytes += int(stored_ratio(namespace) * lengths)
        others_bytes = self._promised_bytes() - promised_bytes
        limit_bytes = max(0, min(self._max_bytes, self._disk_bytes - others_bytes))
        return BudgetReading(bound_bytes + unbound_bytes, limit_bytes)

    async def _pins_in(self, namespace: Namespace) -> tuple[Counter[ChunkKey], list[int]]:
        """Return how many automatic pins each chunk has, and the tokens of pins that are not bound anywhere yet."""
        num_pins, unbound_tokens, breather = Counter[ChunkKey](), list[int](), Breather()
        for prompt in self._prompts.pinned():
            if prompt.origin != "auto":
                continue
            if (row := self._prompts.binding(prompt.pin_id, namespace.namespace_id)) is not None:
                num_pins.update(row.keys)
            elif not self._prompts.bindings_of(prompt.pin_id) and namespace_of(prompt) == namespace.namespace_id:
                unbound_tokens.append(len(prompt.tokens))
            await breather.pause()
        return num_pins, unbound_tokens


def shared(selections: Sequence[Selection], limit_bytes: int) -> list[Selection]:
    """Return what namespaces pin under one budget, from what each would alone: the most saved per byte comes first."""
    chosen = [(number, choice) for number, each in enumerate(selections) for choice in each.chosen]
    chosen.sort(key=lambda each: worth_per_byte(each[1]) * (STAY if each[1].is_pinned else 1.0), reverse=True)
    cut: list[set[bytes]] = [set() for _ in selections]
    left_bytes = limit_bytes
    for number, choice in chosen:
        if choice.added_bytes <= left_bytes:
            left_bytes -= choice.added_bytes
        else:
            cut[number].add(choice.digest)
    return [_without(each, digests) if digests else each for each, digests in zip(selections, cut, strict=True)]


def _without(selection: Selection, digests: set[bytes]) -> Selection:
    kept = [each for each in selection.chosen if each.digest not in digests]
    others = [
        replace(each, verdict=Verdict.OVER_BUDGET) if each.digest in digests else each
        for each in selection.choices
        if each.digest in digests or each.verdict is not Verdict.CHOSEN
    ]
    return Selection(
        choices=(*kept, *others),
        total_bytes=sum(each.added_bytes for each in kept),
        saved_s_per_hour=sum(each.saved_s_per_hour for each in kept),
        saved_share=sum(each.saved_share for each in kept),
    )


def worth_per_byte(choice: PrefixChoice) -> float:
    """Return what a prefix saves, comparable over namespaces: seconds of prefill an hour, per byte."""
    return choice.saved_s_per_hour / max(choice.added_bytes, 1)


def stored_ratio(namespace: Namespace) -> float:
    """Return stored bytes / payload bytes of some packs on disk, 1 while there is none."""
    packs = namespace.index.packs
    lives = [packs.live(pack_id) for pack_id in islice(packs, _SAMPLED_PACKS)]
    raw_bytes = sum(live.raw_bytes for live in lives)
    return min(1.0, sum(live.stored_bytes for live in lives) / raw_bytes) if raw_bytes else 1.0
