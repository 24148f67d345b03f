"""How AIBrix's gateway takes KV cache events, and matches prompts by them.

Source: vllm-project/aibrix at e3e10f9 (2026-08-22, `AibrixGateway`) and at cb9b54c, the branch of its pull request
2587, which was open when it was read (`ProposedAibrixGateway`): `pkg/cache/kvcache/msgpack_decoder.go` decodes,
`pkg/kvevent/handler.go` passes events on, `pkg/utils/syncprefixcacheindexer/sync_hash.go` is the index.

Both know neither salts nor adapters of events: a prompt is its tokens. Left out: limits, what expires, several models.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import Any, ClassVar

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

_ROOT = b"seed"
_Key = bytes


class AibrixGateway:
    """The released index: it takes events as arrays only, and knows no medium.

    Args:
        block_tokens: Of a block, as engines have it (AIBRIX_PREFIX_CACHE_BLOCK_SIZE counts bytes, four a token).
    """

    _takes_maps = False

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._keys: dict[int, _Key] = {}  # by the engines' names
        self._places: dict[_Key, dict[str, set[tuple[int, str]]]] = {}  # engines, and in which group and medium

    def receive(self, pod: str, message: Message) -> None:
        """Take a message; its topic says nothing."""
        for event in decode_batch(message.payload, takes_maps=self._takes_maps):
            if isinstance(event, Stored):
                self._store(pod, event)
            elif isinstance(event, Removed):
                self._remove(pod, event)
            else:
                self.forget(pod)

    def forget(self, pod: str) -> None:
        """Drop an engine from all blocks."""
        for key, pods in list(self._places.items()):
            pods.pop(pod, None)
            if not pods:
                del self._places[key]

    def num_blocks(self, prompt: AskedPrompt) -> dict[str, int]:
        """Return for each engine the last block of a prompt that it has, before the first that no engine has."""
        found: dict[str, int] = {}
        for idx, key in enumerate(self._chain(_ROOT, prompt.tokens)):
            if not (pods := self._places.get(key)):
                break
            found.update(dict.fromkeys(pods, idx + 1))
        return found

    def scores(self, prompt: AskedPrompt) -> dict[str, float]:
        """Return whole percents of the prompt."""
        total = max(len(prompt.tokens) // self._block_tokens, 1)
        return {pod: float(num * 100 // total) for pod, num in self.num_blocks(prompt).items()}

    def _store(self, pod: str, event: Stored) -> None:
        """Each block of an event follows the parent of the event: of several, only the first is ever matched."""
        parent = self._keys.get(event.parent, _ROOT) if event.parent is not None else _ROOT
        for block, tokens in _blocks_of(event):
            key = self._keys.setdefault(block, self._key(parent, tokens))
            self._places.setdefault(key, {}).setdefault(pod, set()).add(_place(event))

    def _remove(self, pod: str, event: Removed) -> None:
        """What one engine has lost in one medium is forgotten of all engines and media."""
        for block in event.blocks:
            if (key := self._keys.pop(block, None)) is not None:
                self._places.pop(key, None)

    def _chain(self, parent: _Key, tokens: Sequence[int]) -> list[_Key]:
        keys: list[_Key] = []
        for begin in range(0, len(tokens) - self._block_tokens + 1, self._block_tokens):
            parent = self._key(parent, tokens[begin : begin + self._block_tokens])
            keys.append(parent)
        return keys

    def _key(self, parent: _Key, tokens: Sequence[int]) -> _Key:
        return hashlib.blake2b(parent + struct.pack(f">{len(tokens)}I", *tokens), digest_size=8).digest()


class ProposedAibrixGateway(AibrixGateway):
    """The index of pull request 2587: maps too, blocks of an event follow each other, media count by speed."""

    _takes_maps = True
    _weights: ClassVar = {"GPU": 1.0, "CPU": 0.5, "STORAGE": 0.25}

    def num_blocks(self, prompt: AskedPrompt) -> dict[str, int]:
        """Return how many blocks each engine has from the first on."""
        return {pod: len(weights) for pod, weights in self._matches(prompt).items()}

    def scores(self, prompt: AskedPrompt) -> dict[str, float]:
        """Return whole percents of the prompt, each block by the fastest medium that has it."""
        total = max(len(prompt.tokens) // self._block_tokens, 1)
        return {pod: float(int(sum(weights) * 100 / total)) for pod, weights in self._matches(prompt).items()}

    def _matches(self, prompt: AskedPrompt) -> dict[str, list[float]]:
        matches: dict[str, list[float]] = {}
        for idx, key in enumerate(self._chain(_ROOT, prompt.tokens)):
            pods = self._places.get(key, {})
            goes_on = [pod for pod in pods if len(matches.get(pod, ())) == idx]
            if not goes_on:
                break
            for pod in goes_on:
                best = max(self._weights.get(medium, 1.0) for _group, medium in pods[pod])
                matches.setdefault(pod, []).append(best)
        return matches

    def _store(self, pod: str, event: Stored) -> None:
        if event.parent is None:
            parent = _ROOT
        elif (known := self._keys.get(event.parent)) is None:
            return
        else:
            parent = known
        for block, tokens in _blocks_of(event):
            parent = self._keys.setdefault(block, self._key(parent, tokens))
            self._places.setdefault(parent, {}).setdefault(pod, set()).add(_place(event))

    def _remove(self, pod: str, event: Removed) -> None:
        for block in event.blocks:
            if (key := self._keys.get(block)) is None:
                continue
            pods = self._places.get(key, {})
            media = pods.get(pod, set())
            media.discard(_place(event))
            if not media:
                pods.pop(pod, None)
            if not pods:
                self._places.pop(key, None)
                del self._keys[block]


def _blocks_of(event: Stored) -> list[tuple[int, Sequence[int]]]:
    """Return blocks with their tokens; nothing where their numbers differ, which the index reports as an error."""
    size = event.block_tokens
    if not event.tokens or len(event.tokens) // size != len(event.blocks):
        return []
    return [(block, event.tokens[idx * size : (idx + 1) * size]) for idx, block in enumerate(event.blocks)]


def _place(event: Stored | Removed) -> tuple[int, str]:
    return event.group or 0, event.medium or "GPU"


def decode_batch(payload: bytes, *, takes_maps: bool) -> list[Decoded]:
    """Return the events of a message.

    Raises:
        RefusedBatchError: One of them cannot be decoded, or is a map and maps are not taken.
    """
    batch = decoded(payload)
    if not isinstance(batch, list) or len(batch) not in (2, 3):
        raise RefusedBatchError(f"expected a time, events, and perhaps a rank: {batch!r}")
    time_s, events, *rank = batch
    if not isinstance(time_s, float) or not isinstance(events, list) or not all(isinstance(each, int) for each in rank):
        raise RefusedBatchError(f"expected a time, events, and perhaps a rank: {batch!r}")
    return [_decode_event(each, takes_maps=takes_maps) for each in events]


def _decode_event(event: Any, *, takes_maps: bool) -> Decoded:
    if isinstance(event, list) and event:
        tag, fields = event[0], Fields.of_array(event)
    elif isinstance(event, dict) and takes_maps:
        tag, fields = event.get("type"), Fields(event)
    else:
        raise RefusedBatchError(f"expected msgpack array, got {type(event).__name__}")
    match tag:
        case "BlockStored":
            return _decode_stored(fields)
        case "BlockRemoved":
            blocks = tuple(map(_block, fields.required("block_hashes", list)))
            medium, group = fields.optional("medium", str), fields.optional("group_idx", int)
            return Removed(blocks=blocks, medium=medium, group=group)
        case "AllBlocksCleared":
            return Cleared()
    raise RefusedBatchError(f"unknown event type {tag!r}")


def _decode_stored(fields: Fields) -> Stored:
    tokens, block_tokens = fields.required("token_ids", list), fields.required("block_size", int)
    if tokens and (block_tokens <= 0 or len(tokens) % block_tokens):
        raise RefusedBatchError(f"{len(tokens)} tokens are no blocks of {block_tokens}")
    parent = fields.optional("parent_block_hash", object)
    return Stored(
        blocks=tuple(map(_block, fields.required("block_hashes", list))),
        parent=None if parent is None else _block(parent),
        tokens=tuple(tokens),
        block_tokens=block_tokens,
        medium=fields.optional("medium", str),
        adapter=fields.optional("lora_name", str),
        extra_keys=fields.optional("extra_keys", list),
        group=fields.optional("group_idx", int),
    )


def _block(name: object) -> int:
    """Return an engine's name of a block as 64 bits: of bytes, the first ones."""
    if isinstance(name, int):
        return name % 2**64
    if isinstance(name, bytes) and name:
        return int.from_bytes(name[:8], "big")
    raise RefusedBatchError(f"a block is named {name!r}")
