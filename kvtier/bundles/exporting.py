"""From a durable prompt to the bytes of its bundle."""

import os
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path

from kvtier.bundles.bundle_format import Bundle, BundleChunk, BundlePrompt, build_header
from kvtier.bundles.spool import PACK_SUFFIX, Spool, in_batches
from kvtier.core.stored import StoredChunk
from kvtier.disk.disk_usage import ScratchRoom
from kvtier.errors import BundleDamagedError, ChunkDamagedError, DiskRoomError, PromptNotDurableError, TierIOError
from kvtier.ledger import BindingRow, PromptRow
from kvtier.service import Cache
from kvtier.service.namespace import Namespace
from kvtier.service.scratch import scratch_folder

PIECE_BYTES = 1024**2
_MAX_TRIES = 3


async def export_bundle(cache: Cache, name: str, namespace_id: str) -> AsyncGenerator[bytes, None]:
    """Yield the prompt's bundle in pieces of at most 1 MiB.

    The whole is written to a scratch file and verified there first: what is sent is what was verified, and eviction or
    compaction in the meantime cannot tear it. It takes the bundle's size of disk space beyond `disk.bytes` for so long,
    which is kept for it before the first byte is written.

    Args:
        cache: Loop thread only.
        name: The prompt.
        namespace_id: Or the beginning of one; empty for the only one in which the prompt is durable.

    Raises:
        PromptNotFoundError: There is no such prompt.
        PromptNotDurableError: It is not whole on disk, or it is not clear which namespace is meant.
        DiskRoomError: The file system has no room for the bundle.
        InvalidArgumentError: It has more chunks than a bundle's header may name.
        ChunkDamagedError: A chunk on disk is not what was written.
        TierIOError: The operating system refused.
    """
    stores = cache.stores
    with stores.disk_usage.scratch_room() as room, await stores.in_io(_spool_in, cache.config.disk.disk_dir) as spool:
        await _fill(cache, spool, room, name, namespace_id)
        for offset in range(0, spool.num_bytes, PIECE_BYTES):
            yield await stores.in_io(spool.read, PIECE_BYTES, offset)


def _spool_in(state_dir: Path) -> Spool:
    return Spool(scratch_folder(state_dir))


async def _fill(cache: Cache, spool: Spool, room: ScratchRoom, name: str, namespace_id: str) -> None:
    for attempt in range(_MAX_TRIES):
        prompt = cache.prompts.get(name)
        namespace, binding = _choose(cache, prompt, namespace_id)
        stored = _stored(namespace, binding, name)
        try:
            await _write(cache, spool, room, _bundle(prompt, namespace, binding, stored), stored)
        except (FileNotFoundError, EOFError) as exc:
            # Compaction or an eviction took the pack away meanwhile: look again where the chunks are.
            if attempt + 1 == _MAX_TRIES:
                raise PromptNotDurableError(name, f"its packs cannot be read: {exc}") from exc
        except BundleDamagedError as exc:
            raise ChunkDamagedError(Path(name), f"{exc}; run `kvtier fsck --deep`") from exc
        else:
            return


def _choose(cache: Cache, prompt: PromptRow, wanted: str) -> tuple[Namespace, BindingRow]:
    bindings = [row for row in cache.prompts.bindings_of(prompt.pin_id) if row.namespace_id.startswith(wanted)]
    found = [(cache.namespaces[row.namespace_id], row) for row in bindings if row.namespace_id in cache.namespaces]
    durable = [(namespace, row) for namespace, row in found if _is_durable(namespace, row)]
    if len(durable) == 1:
        return durable[0]
    if durable:
        ids = ", ".join(sorted(namespace.namespace_id for namespace, _ in durable))
        raise PromptNotDurableError(prompt.name, f"it is in several namespaces; choose one with --namespace: {ids}")
    where = f" in a namespace {wanted}" if wanted else ""
    raise PromptNotDurableError(prompt.name, f"not all of it is on disk{where} yet; see `kvtier show {prompt.name}`")


def _is_durable(namespace: Namespace, row: BindingRow) -> bool:
    chunks = [namespace.table.get(key) for key in row.keys]
    return bool(chunks) and all(chunk is not None and chunk.location is not None for chunk in chunks)


def _stored(namespace: Namespace, row: BindingRow, name: str) -> list[StoredChunk]:
    stored = []
    for key in dict.fromkeys(row.keys):
        chunk = namespace.table.get(key)
        if chunk is None or chunk.location is None:
            raise PromptNotDurableError(name, "a chunk of it left the disk this moment")
        stored.append(chunk.location)
    return stored


def _bundle(prompt: PromptRow, namespace: Namespace, row: BindingRow, stored: Sequence[StoredChunk]) -> Bundle:
    return Bundle(
        prompt=BundlePrompt(
            name=prompt.name,
            tokens=tuple(prompt.tokens),
            model=prompt.model,
            lora_name=prompt.lora_name,
            lora_path=prompt.lora_path,
            cache_salt=prompt.cache_salt,
            recipe_json=prompt.recipe_json,
            priority=prompt.priority,
        ),
        model=namespace.row.model,
        fingerprint=dict(namespace.fingerprint),
        layout=namespace.layout,
        keys=row.keys,
        covered_tokens=row.covered_tokens,
        chunks=tuple(_chunk(chunk, "0" * 64) for chunk in stored),
    )


def _chunk(chunk: StoredChunk, sha256: str) -> BundleChunk:
    return BundleChunk(
        key=chunk.key,
        stored_bytes=chunk.stored_bytes,
        raw_bytes=chunk.raw_bytes,
        codec=chunk.codec,
        checksum=chunk.checksum,
        sha256=sha256,
    )


async def _write(cache: Cache, spool: Spool, room: ScratchRoom, draft: Bundle, stored: Sequence[StoredChunk]) -> None:
    stores, packs = cache.stores, cache.config.disk.disk_dir / "packs"
    data_offset = offset = len(await stores.in_io(build_header, draft))  # digests do not change its length
    await _keep_room(cache, room, draft.prompt.name, data_offset + draft.data_bytes)
    chunks: list[BundleChunk] = []
    for batch in in_batches(stored, [chunk.stored_bytes for chunk in stored]):
        sha256s = await stores.in_io(_copy, spool, packs, batch, offset)
        chunks += [_chunk(chunk, sha256) for chunk, sha256 in zip(batch, sha256s, strict=True)]
        offset += sum(chunk.stored_bytes for chunk in batch)
        room.grew(spool.num_bytes)
    bundle = replace(draft, chunks=tuple(chunks))
    for part in in_batches(list(bundle.offsets(data_offset)), [chunk.raw_bytes for chunk in chunks]):
        await stores.in_io(spool.verify, part)
    await stores.in_io(spool.write, await stores.in_io(build_header, bundle), 0)


async def _keep_room(cache: Cache, room: ScratchRoom, name: str, file_bytes: int) -> None:
    """Nothing is dropped for it: the disk's cache is worth more than a copy of a part of it."""
    usage = cache.stores.disk_usage
    await cache.stores.measure_disk()
    if room.file_shortage(file_bytes) > 0:
        raise DiskRoomError(f"the export of prompt {name!r}", file_bytes, usage.free_bytes, usage.kept_bytes)
    room.keep(file_bytes)


def _copy(spool: Spool, packs: Path, batch: Sequence[StoredChunk], offset: int) -> list[str]:
    sha256s = []
    for chunk in batch:
        path = packs / (chunk.pack_id + PACK_SUFFIX)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise
        except OSError as exc:
            raise TierIOError(path, "open", exc) from exc
        try:
            sha256s.append(spool.copy_in(fd, chunk.offset, chunk.stored_bytes, offset))
        except OSError as exc:
            raise TierIOError(path, "read", exc) from exc
        finally:
            os.close(fd)
        offset += chunk.stored_bytes
    return sha256s
