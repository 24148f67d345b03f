"""How llm-d's router takes KV cache events, and scores engines by them.

Source: llm-d/llm-d-router at ebab687 (2026-08-22): `pkg/kvevents/engineadapter/vllm_adapter.go` and `common.go` decode;
`pkg/kvevents/pool.go` and `event_dedup_filter.go` decide what an event changes; `pkg/kvcache/kvblock/in_memory.go`,
`token_processor.go` and `extra_keys.go` are the index; `pkg/kvcache/kvblock_scorer.go` and `backend.go` score; the keys
of a request are in `pkg/epp/.../preciseprefixcache/blockkeys.go`.

Left out: engines whose blocks are not those of the router (its guide wants them equal), images, other groups than those
of full attention, the bound of the index, guesses about requests under way.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from tests.subscribers.wire import (
    AskedPrompt,
    Cleared,
    Decoded,
    Fields,
    Message,
    RefusedBatchError,
    Removed,
    Stored,
    decoded,
)

MEDIUM_WEIGHTS = {"gpu": 1.0, "cpu": 0.8}
UNKNOWN_MEDIUM_WEIGHT = 1.0
ENTRIES_PER_BLOCK = 10
"""Of engines and media that are kept for a block; the least recent one leaves."""
_PREFIX_KINDS = ("full_attention", "mla_attention", "sink_full_attention")
_Key = bytes  # the router's own name of a block


class AdapterNames(Enum):
    """What becomes of the adapter's name in the extra keys of a block."""

    HASHED = "hashed"
    """ebab687: like an image's. Keys of requests lack it, so nothing of an adapter is ever found."""
    SKIPPED = "skipped"
    """Since llm-d-router#2929 (2026-09)."""


class _Entry(NamedTuple):
    pod: str
    medium: str
    group: int | None


class LlmdRouter:
    """An index of its own keys, and for each block where it is.

    Args:
        block_tokens: Of a block, as engines have it.
        adapter_names: Of which version.
        weights: Of media, by their names in small letters.
    """

    def __init__(
        self,
        block_tokens: int,
        adapter_names: AdapterNames = AdapterNames.SKIPPED,
        weights: Mapping[str, float] = MEDIUM_WEIGHTS,
    ) -> None:
        self._block_tokens, self._adapter_names, self._weights = block_tokens, adapter_names, weights
        self._keys: dict[int, _Key] = {}  # by the engines' names; all engines name equal blocks equally
        self._places: dict[_Key, OrderedDict[_Entry, None]] = {}
        self._kinds: dict[tuple[str, int], str] = {}  # of an engine's group
        self._references: Counter[tuple[_Entry, int]] = Counter()

    def receive(self, pod: str, message: Message) -> None:
        """Take a message. The model is the last part of its topic, which is `kv@POD@MODEL`."""
        events = decode_batch(message.payload)
        parts = message.topic.decode().split("@")
        model = parts[2] if len(parts) == 3 else ""
        for event in events:
            if isinstance(event, Stored):
                self._store(pod, model, event)
            elif isinstance(event, Removed):
                self._remove(pod, event)
            else:
                self.forget(pod)

    def forget(self, pod: str) -> None:
        """Drop all entries of an engine. Names of blocks stay: parents are found by them."""
        for key, entries in list(self._places.items()):
            for entry in [entry for entry in entries if entry.pod == pod]:
                self._drop(key, entry)
        for reference in [reference for reference in self._references if reference[0].pod == pod]:
            del self._references[reference]

    def num_blocks(self, prompt: AskedPrompt) -> dict[str, int]:
        """Return how many blocks each engine has, in any medium."""
        return {pod: len(weights) for pod, weights in self._matches(prompt).items()}

    def scores(self, prompt: AskedPrompt) -> dict[str, float]:
        """Return the sum of the weights of these blocks."""
        return {pod: sum(weights) for pod, weights in self._matches(prompt).items()}

    def _matches(self, prompt: AskedPrompt) -> dict[str, list[float]]:
        num_blocks = len(prompt.tokens) // self._block_tokens
        extra: list[Sequence[str]] = [()] * num_blocks
        if prompt.cache_salt and num_blocks:
            extra[0] = (prompt.cache_salt,)
        matches: dict[str, list[float]] = {}
        root = self._root(prompt.adapter or prompt.model)
        for idx, key in enumerate(self._chain(root, prompt.tokens, extra)):
            best: dict[str, float] = {}
            for entry in self._places.get(key, ()):
                weight = self._weights.get(entry.medium, UNKNOWN_MEDIUM_WEIGHT)
                best[entry.pod] = max(weight, best.get(entry.pod, weight))
            if not best:
                break
            for pod, weight in best.items():
                if len(matches.get(pod, ())) == idx:
                    matches.setdefault(pod, []).append(weight)
        return matches

    def _store(self, pod: str, model: str, event: Stored) -> None:
        entry = _Entry(pod, _medium(event.medium), event.group)
        if event.group is not None and not self._takes_group(pod, event.group, event):
            return
        if event.parent is None:
            parent = self._root(event.adapter or model)
        elif (known := self._keys.get(event.parent)) is None:
            return
        else:
            parent = known
        if not event.tokens:  # only where the blocks are: of blocks that are known
            keys = [key for block in event.blocks if (key := self._keys.get(block)) is not None]
            if not keys:
                return
        else:
            keys = self._chain(parent, event.tokens, self._extra_keys(event))
            self._keys.update(zip(event.blocks, keys, strict=True))
        for key in keys:
            entries = self._places.setdefault(key, OrderedDict())
            entries[entry] = None
            entries.move_to_end(entry)
            if len(entries) > ENTRIES_PER_BLOCK:
                entries.popitem(last=False)
        self._references.update((entry, block) for block in event.blocks)

    def _takes_group(self, pod: str, group: int, event: Stored) -> bool:
        """Return whether blocks of this group are indexed. An event without its kind is of the kind seen before."""
        if event.kind is not None:
            self._kinds[pod, group] = event.kind
        if self._kinds.get((pod, group)) not in _PREFIX_KINDS:
            return False
        is_whole = len(event.tokens) == len(event.blocks) * event.block_tokens and event.block_tokens > 0
        return is_whole or not event.tokens

    def _remove(self, pod: str, event: Removed) -> None:
        if event.group is not None and self._kinds.get((pod, event.group)) not in _PREFIX_KINDS:
            return
        entry = _Entry(pod, _medium(event.medium), event.group)
        for block in event.blocks:
            if self._references[entry, block] > 1:
                self._references[entry, block] -= 1
                continue
            del self._references[entry, block]
            if (key := self._keys.get(block)) is not None:
                self._drop(key, entry)
                if key not in self._places:
                    del self._keys[block]

    def _drop(self, key: _Key, entry: _Entry) -> None:
        entries = self._places.get(key, OrderedDict())
        entries.pop(entry, None)
        if not entries:
            self._places.pop(key, None)

    def _extra_keys(self, event: Stored) -> list[Sequence[str]]:
        """Return what else names each block: every string, and the first of a pair."""
        if event.extra_keys is None:
            return [()] * len(event.blocks)
        of_blocks: list[Sequence[str]] = []
        for keys in event.extra_keys:
            names = [key[0] if isinstance(key, list) and key else key for key in keys or ()]
            if self._adapter_names is AdapterNames.SKIPPED and names and names[0] == event.adapter:
                names = names[1:]
            of_blocks.append([name for name in names if isinstance(name, str)])
        return of_blocks

    def _root(self, model: str) -> _Key:
        return hashlib.blake2b(model.encode(), digest_size=8).digest()

    def _chain(self, parent: _Key, tokens: Sequence[int], extra: Sequence[Sequence[str]]) -> list[_Key]:
        """Return the names of whole blocks after a parent."""
        keys: list[_Key] = []
        for idx in range(len(tokens) // self._block_tokens):
            block = tokens[idx * self._block_tokens : (idx + 1) * self._block_tokens]
            content = msgspec.msgpack.encode((list(block), list(extra[idx])))
            parent = hashlib.blake2b(parent + content, digest_size=8).digest()
            keys.append(parent)
        return keys


def _medium(medium: str | None) -> str:
    return (medium or "gpu").lower()


def decode_batch(payload: bytes) -> list[Decoded]:
    """Return the events of a message. Each is an array by position, or a map by name (vLLM since its #42892).

    Raises:
        RefusedBatchError: One of them cannot be decoded.
    """
    batch = decoded(payload)
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise RefusedBatchError(f"no batch: {batch!r}")
    return [_decode_event(each) for each in batch[1]]


def _decode_event(event: Any) -> Decoded:
    if isinstance(event, dict):
        tag, fields = event.get("type"), Fields(event)
    elif isinstance(event, list) and event:
        tag, fields = event[0], Fields.of_array(event)
    else:
        raise RefusedBatchError(f"neither an array nor a map: {event!r}")
    match tag:
        case "BlockStored":
            return _decode_stored(fields)
        case "BlockRemoved":
            blocks = tuple(map(_block, fields.required("block_hashes", list)))
            return Removed(blocks=blocks, medium=fields.optional("medium", str), group=_group(fields))
        case "AllBlocksCleared":
            return Cleared()
    raise RefusedBatchError(f"unknown event {tag!r}")


def _decode_stored(fields: Fields) -> Stored:
    parent = fields.optional("parent_block_hash", object)
    return Stored(
        blocks=tuple(map(_block, fields.required("block_hashes", list))),
        parent=None if parent is None else _block(parent) or None,
        tokens=tuple(fields.required("token_ids", list)),
        block_tokens=fields.required("block_size", int),
        medium=fields.optional("medium", str),
        adapter=fields.optional("lora_name", str),
        extra_keys=fields.optional("extra_keys", list),
        group=_group(fields),
        kind=fields.optional("kv_cache_spec_kind", str),
    )


def _group(fields: Fields) -> int | None:
    group: int | None = fields.optional("group_idx", int)
    if group is not None and group < 0:
        raise RefusedBatchError(f"group_idx is {group}")
    return group


def _block(name: object) -> int:
    """Return an engine's name of a block as 64 bits: of bytes, the last ones."""
    if isinstance(name, int):
        return name % 2**64
    if isinstance(name, bytes) and name:
        return int.from_bytes(name[-8:], "big")
    raise RefusedBatchError(f"a block is named {name!r}")
