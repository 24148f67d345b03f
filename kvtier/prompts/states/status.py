"""What operators see: prompts, tiers, sessions and namespaces as plain values, computed when asked."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from kvtier.concurrency.turns import slices
from kvtier.core.chunks.chunk import Chunk
from kvtier.ledger import BindingRow, PromptRow
from kvtier.sessions.session import Session
from kvtier.tiering.namespace import Namespace


class PromptState(Enum):
    """PromptStatus.State of proto/kvtier/v1/cache.proto; the meanings stand there."""

    UNRENDERED = auto()
    WAITING = auto()
    CAPTURING = auto()
    DURABLE = auto()
    OVER_QUOTA = auto()
    STALE = auto()
    REFRESHING = auto()
    REFUSED = auto()


@dataclass(frozen=True, kw_only=True)
class BindingView:
    """A prompt in one namespace."""

    namespace_id: str
    model: str
    covered_tokens: int
    num_chunks: int
    num_host_chunks: int
    num_durable_chunks: int
    num_refused_chunks: int
    num_shared_chunks: int
    raw_bytes: int
    durable_raw_bytes: int
    disk_bytes: int
    disk_share_bytes: int
    live: bool
    ephemeral: bool

    @property
    def durable(self) -> bool:
        """Every reachable chunk is in an fsynced pack; of an ephemeral namespace, in host memory."""
        return self._num_kept == self.num_chunks

    @property
    def begun(self) -> bool:
        """Some chunk is."""
        return bool(self._num_kept)

    @property
    def _num_kept(self) -> int:
        return self.num_host_chunks if self.ephemeral else self.num_durable_chunks


class Durability(NamedTuple):
    """Of a prompt in one namespace, only what its state depends on: quick to find out."""

    namespace_id: str
    durable: bool
    begun: bool
    num_refused_chunks: int


@dataclass(frozen=True, kw_only=True)
class PromptView:
    """A prompt and how far its promise is kept."""

    prompt: PromptRow
    state: PromptState
    bindings: tuple[BindingView, ...]
    num_engines: int
    num_confirmed: int
    error: str
    replacement: str = ""


def durability_of(namespace: Namespace, row: BindingRow) -> Durability:
    """Look whether every chunk of a binding is kept as `BindingView.durable` says, as far as the first that is not."""
    chunks = namespace.table.get_all(row.keys)
    is_kept = _is_readable if namespace.ephemeral else _is_on_disk
    return Durability(
        namespace.namespace_id,
        all(map(is_kept, chunks)),
        any(map(is_kept, chunks)),
        _num_refused(namespace, row),
    )


def why_not_readable(namespace: Namespace, row: BindingRow) -> str:
    """Say why chunks of a binding that are on disk alone cannot be read now; empty: each can, as far as is known."""
    is_off = not namespace.resources.disk_health.readable
    if namespace.ephemeral or not (is_off or namespace.packs_without_key):
        return ""
    for chunk in namespace.table.known(row.keys):
        if chunk.readable or not chunk.on_disk:
            continue
        if is_off:
            return "reading from disk is off"
        if (place := chunk.location) is not None and place.pack_id in namespace.packs_without_key:
            return "chunks are sealed with a key that is not in disk.key_file"
    return ""


def _is_on_disk(chunk: Chunk | None) -> bool:
    return chunk is not None and chunk.on_disk


def _is_readable(chunk: Chunk | None) -> bool:
    return chunk is not None and chunk.readable


def _num_refused(namespace: Namespace, row: BindingRow) -> int:
    queue = namespace.write_back.queue
    return sum(map(queue.is_refused, row.keys)) if queue.num_refused else 0


async def view_binding(namespace: Namespace, row: BindingRow, *, pinned: bool) -> BindingView:
    """Count where the chunks of a binding are; of a long one in slices, with turns of the loop between them."""
    num_host_chunks = num_durable_chunks = num_shared_chunks = durable_raw_bytes = disk_bytes = 0
    disk_share_bytes, num_own_pins = 0.0, int(pinned)
    for number, keys in enumerate(slices(row.keys)):
        if number:
            await asyncio.sleep(0)
        chunks = namespace.table.known(keys)
        placed = namespace.table.totals_on_disk(chunks)
        num_host_chunks += sum([chunk.readable for chunk in chunks])
        num_durable_chunks += placed.num_placed
        disk_bytes += placed.stored_bytes
        durable_raw_bytes += placed.raw_bytes
        num_shared = sum([chunk.num_pins > num_own_pins for chunk in chunks])
        num_shared_chunks += num_shared
        disk_share_bytes += _share_of_bytes(chunks, pinned=pinned) if num_shared else placed.stored_bytes
    return BindingView(
        namespace_id=namespace.namespace_id,
        model=namespace.row.model,
        covered_tokens=row.covered_tokens,
        num_chunks=len(row.keys),
        num_host_chunks=num_host_chunks,
        num_durable_chunks=num_durable_chunks,
        num_refused_chunks=_num_refused(namespace, row),
        num_shared_chunks=num_shared_chunks,
        raw_bytes=namespace.layout.total_payload_bytes(row.keys),
        durable_raw_bytes=durable_raw_bytes,
        disk_bytes=disk_bytes,
        disk_share_bytes=round(disk_share_bytes),
        live=namespace.live,
        ephemeral=namespace.ephemeral,
    )


async def chunk_map(namespace: Namespace, row: BindingRow) -> bytes:
    """Return for each chunk of a binding where it lies: 1 on disk, 2 in host memory, 3 in both, 0 nowhere.

    Looked at in slices, as `view_binding` does.
    """
    places = bytearray()
    for number, keys in enumerate(slices(row.keys)):
        if number:
            await asyncio.sleep(0)
        places += bytes(_is_on_disk(chunk) | _is_readable(chunk) << 1 for chunk in namespace.table.get_all(keys))
    return bytes(places)


def _share_of_bytes(chunks: Iterable[Chunk], *, pinned: bool) -> float:
    """Return what chunks of a prompt take on disk, those of several pinned prompts in equal parts."""
    held = ((chunk.num_pins, chunk.stored_bytes) for chunk in chunks if chunk.on_disk)
    if not pinned:
        return sum(stored_bytes for num_pins, stored_bytes in held if not num_pins)
    return sum(stored_bytes / max(1, num_pins) for num_pins, stored_bytes in held)


def view_prompt(prompt: PromptRow, bindings: Sequence[BindingView], sessions: Sequence[Session]) -> PromptView:
    """Judge a prompt by its bindings, that in the namespace used last at the end, and the engines attached now."""
    serving = [session for session in sessions if session.serves(prompt)]
    errors = [session.bind_errors[prompt.pin_id] for session in serving if prompt.pin_id in session.bind_errors]
    return PromptView(
        prompt=prompt,
        state=state_of(prompt, bindings, serving),
        bindings=tuple(bindings),
        num_engines=len(serving),
        num_confirmed=sum(prompt.pin_id in session.bound for session in serving),
        error=errors[0] if errors else "",
    )


def state_of(
    prompt: PromptRow, bindings: Sequence[BindingView] | Sequence[Durability], serving: Sequence[Session]
) -> PromptState:
    """Judge how far a prompt's promise is kept; `serving`: engines attached now that shall recognize it."""
    if not prompt.tokens:
        return PromptState.UNRENDERED
    live_ids = {session.namespace_id for session in serving}
    relevant = [binding for binding in bindings if binding.namespace_id in live_ids] if live_ids else bindings[-1:]
    if not relevant:
        is_refused = any(prompt.pin_id in session.bind_errors for session in serving)
        return PromptState.REFUSED if is_refused else PromptState.WAITING
    if len(relevant) >= len(live_ids) and all(binding.durable for binding in relevant):
        return PromptState.DURABLE
    if any(binding.num_refused_chunks for binding in relevant):
        return PromptState.OVER_QUOTA
    if any(binding.durable for binding in bindings if binding.namespace_id not in live_ids):
        is_begun = any(binding.begun for binding in relevant)
        return PromptState.REFRESHING if is_begun else PromptState.STALE
    return PromptState.CAPTURING
