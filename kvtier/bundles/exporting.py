"""From a durable prompt to the bytes of its bundle."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import ParamSpec, TypeVar

from kvtier.bundles.bundle import TEXTS, Bundle, BundleChunk
from kvtier.bundles.bundle_format import DIGEST_BYTES, build_front
from kvtier.bundles.decoded import DecodedFile
from kvtier.bundles.spool import Spool, in_batches, raw_bytes_of, stored_bytes_of
from kvtier.concurrency.turns import BATCH_BYTES, slices
from kvtier.core.limits import PIECE_BYTES
from kvtier.disk.disk_usage import ScratchSpace
from kvtier.errors import (
    BundleDamagedError,
    ChunkDamagedError,
    DiskSpaceError,
    NamespaceQuarantinedError,
    PromptNotDurableError,
    PromptNotFoundError,
)
from kvtier.ledger import BindingRow, PromptRow
from kvtier.prompts.book import RequestedPin
from kvtier.service import Cache
from kvtier.tiering.namespace import Namespace
from kvtier.tiering.pacing import MAX_YIELD_S
from kvtier.tiering.resources import Resources

P = ParamSpec("P")
T = TypeVar("T")

MaySee = Callable[[PromptRow], bool]
"""Says whether a prompt exists for the caller."""


def _everything(_: PromptRow) -> bool:
    return True


async def export_bundle(
    cache: Cache, name: str, namespace_id: str, *, decoded: bool = False, may_see: MaySee = _everything
) -> AsyncGenerator[bytes, None]:
    """Yield the prompt's bundle in pieces of at most 1 MiB. Loop thread only.

    The whole bundle is first written to a scratch file and verified there, so eviction and compaction cannot tear what
    is sent. The file takes disk space beyond `disk.bytes`, which is kept for it before the first byte is written.

    Args:
        cache: Has the prompt.
        name: Of the prompt.
        namespace_id: Or the beginning of one; empty for the only one in which the prompt is durable.
        decoded: Send the file of `decoded.py` instead, which takes space beside the bundle's.
        may_see: Says whether there is such a prompt for the caller.

    Raises:
        PromptNotFoundError: There is no such prompt.
        NamespaceQuarantinedError: Its namespace is quarantined, and the file is to be imported elsewhere.
        PromptNotDurableError: It is not whole on disk, or it is not clear which namespace is meant.
        DiskSpaceError: The file system has no space for the file.
        ChunkDamagedError: A chunk on disk is not what was written.
        TierIOError: The operating system refused.
    """
    run = _Runner(cache.resources, in_background=False)
    async with (
        verified_bundle(cache, name, namespace_id, may_be_quarantined=decoded, may_see=may_see) as (
            bundle,
            spool,
        ),
        AsyncExitStack() as stack,
    ):
        num_bytes = bundle.file_bytes
        if decoded:  # it cannot be imported: it is for looking
            bundle_spool = spool
            spool, space = await _scratch_file(cache, run, stack)
            await _decode(cache, bundle, bundle_spool, spool, space)
            num_bytes = spool.num_bytes
        for offset in range(0, num_bytes, PIECE_BYTES):
            yield await run(spool.read, min(PIECE_BYTES, num_bytes - offset), offset)


@asynccontextmanager
async def verified_bundle(
    cache: Cache,
    name: str,
    namespace_id: str,
    *,
    may_be_quarantined: bool = False,
    in_background: bool = False,
    may_see: MaySee = _everything,
) -> AsyncIterator[tuple[Bundle, Spool]]:
    """Have a prompt's bundle in a scratch file during the block, as its first `file_bytes` bytes.

    Arguments and errors as `export_bundle`.

    Args:
        may_be_quarantined: Of the namespace: the bundle will not be imported.
        in_background: No one waits for it: it takes the thread of other such work, and waits for requests.
    """
    run = _Runner(cache.resources, in_background=in_background)
    async with AsyncExitStack() as stack:
        spool, space = await _scratch_file(cache, run, stack)
        bundle = await _fill(
            cache, run, spool, space, name, namespace_id, may_be_quarantined=may_be_quarantined, may_see=may_see
        )
        if not may_be_quarantined:
            check_not_quarantined(cache, bundle.namespace_id)
        yield bundle, spool


def check_not_quarantined(cache: Cache, namespace_id: str) -> None:
    """Raise NamespaceQuarantinedError if what the namespace holds is not to be trusted."""
    namespace = cache.namespaces.get(namespace_id)
    if namespace is not None and namespace.quarantine is not None:
        raise NamespaceQuarantinedError(namespace_id, namespace.quarantine.reason)


class _Runner:
    """Runs the blocking calls of an export.

    Attributes:
        batch_bytes: Of one call.
    """

    def __init__(self, resources: Resources, *, in_background: bool) -> None:
        self._resources, self._in_background = resources, in_background
        self.batch_bytes = BATCH_BYTES if in_background else 8 * BATCH_BYTES

    async def __call__(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        if not self._in_background:
            return await self._resources.in_io(call, *args, **kwargs)
        await self._resources.request_reads.until_quiet(MAX_YIELD_S)
        return await self._resources.in_background(call, *args, **kwargs)


async def _scratch_file(cache: Cache, run: _Runner, stack: AsyncExitStack) -> tuple[Spool, ScratchSpace]:
    """Return a scratch file and the space kept for it, none yet; both last as long as the stack."""
    space = stack.enter_context(cache.resources.disk_usage.scratch_space())
    return await run(Spool.of_disk, cache.config.disk.disk_dir, cache.resources.disk, stack, run), space


async def _fill(
    cache: Cache,
    run: _Runner,
    spool: Spool,
    space: ScratchSpace,
    name: str,
    namespace_id: str,
    *,
    may_be_quarantined: bool,
    may_see: MaySee,
) -> Bundle:
    num_tries = 0
    while True:
        prompt = cache.prompts.get(name)
        if not may_see(prompt):
            raise PromptNotFoundError(name)
        draft = await _draft(cache, prompt, namespace_id)
        if not may_be_quarantined:
            check_not_quarantined(cache, draft.namespace_id)
        try:
            return await _write(cache, run, spool, space, draft)
        except (FileNotFoundError, EOFError) as exc:
            # Compaction or an eviction took the pack away meanwhile: look again where the chunks are.
            num_tries += 1
            if num_tries == 3:
                raise PromptNotDurableError(name, f"its packs cannot be read: {exc}") from exc
        except BundleDamagedError as exc:
            raise ChunkDamagedError(Path(name), f"{exc}; run `kvtier fsck --deep`") from exc


async def _draft(cache: Cache, prompt: PromptRow, wanted: str) -> Bundle:
    """Return the bundle as it would be now: the chunks lie in their packs, and have no digests yet."""
    known = cache.namespaces
    bindings = [row for row in cache.prompts.bindings_of(prompt.pin_id) if row.namespace_id.startswith(wanted)]
    found = [await _bundle(prompt, namespace, row) for row in bindings if (namespace := known.get(row.namespace_id))]
    durable = [bundle for bundle in found if bundle is not None]
    if len(durable) == 1:
        return durable[0]
    if durable:
        ids = ", ".join(sorted(bundle.namespace_id for bundle in durable))
        raise PromptNotDurableError(prompt.name, f"it is in several namespaces; choose one with --namespace: {ids}")
    where = f" in a namespace {wanted}" if wanted else ""
    raise PromptNotDurableError(prompt.name, f"not all of it is on disk{where} yet; see `kvtier show {prompt.name}`")


async def _bundle(prompt: PromptRow, namespace: Namespace, row: BindingRow) -> Bundle | None:
    """Return None unless every chunk is on disk; with turns of the loop.

    What moves or goes meanwhile is noticed as if it did later, when its pack is read.
    """
    chunks: list[BundleChunk] = []
    for part in slices(list(dict.fromkeys(row.keys))):
        places = [chunk.location for chunk in namespace.table.known(part)]
        found = [BundleChunk(place, bytes(DIGEST_BYTES)) for place in places if place is not None]
        if len(found) < len(part):
            return None
        chunks += found
        await asyncio.sleep(0)
    if not chunks:
        return None
    return Bundle(
        prompt=RequestedPin(**{name: getattr(prompt, name) for name in (*TEXTS, "tokens", "recipe_json", "priority")}),
        model=namespace.row.model,
        fingerprint=dict(namespace.fingerprint),
        layout=namespace.layout,
        covered_tokens=row.covered_tokens,
        chunks=chunks,
    )


async def _write(cache: Cache, run: _Runner, spool: Spool, space: ScratchSpace, draft: Bundle) -> Bundle:
    """Copy the chunks, verify the copies, and only then write what stands before them."""
    packs, in_packs = cache.config.disk.disk_dir / "packs", draft.chunks
    spool.begin_again()
    draft, offset = await run(_opened, draft)
    await _keep_capacity(cache, space, draft.prompt.name, offset + draft.data_bytes)
    chunks: list[BundleChunk] = []
    for batch in await run(in_batches, in_packs, stored_bytes_of, run.batch_bytes):
        copied = await run(_copy, spool, packs, batch, offset)
        offset += sum(chunk.stored.stored_bytes for chunk in copied)
        chunks += copied
        space.grew(spool.num_bytes)
    for part in await run(in_batches, chunks, raw_bytes_of, run.batch_bytes):
        await run(spool.verify, part)
    bundle = replace(draft, chunks=chunks)
    await run(spool.write, await run(build_front, bundle), 0)
    return bundle


def _opened(draft: Bundle) -> tuple[Bundle, int]:
    """Worker thread: the bundle with its chunks as they are once they are not sealed, and where the first begins."""
    opened = replace(draft, chunks=[chunk._replace(stored=chunk.stored.opened()) for chunk in draft.chunks])
    _ = opened.data_bytes  # made here, once
    return opened, len(build_front(opened))


async def _decode(cache: Cache, bundle: Bundle, source: Spool, target: Spool, space: ScratchSpace) -> None:
    decoded = await cache.resources.in_io(DecodedFile, bundle)
    await _keep_capacity(cache, space, bundle.prompt.name, decoded.file_bytes)
    await cache.resources.in_io(decoded.write_front, target)
    written_bytes = 0
    for batch in await cache.resources.in_io(in_batches, bundle.chunks, raw_bytes_of):
        await cache.resources.in_io(decoded.write_chunks, source, target, batch)
        written_bytes += sum(chunk.stored.raw_bytes for chunk in batch)
        space.grew(written_bytes)


async def _keep_capacity(cache: Cache, space: ScratchSpace, name: str, file_bytes: int) -> None:
    """Nothing is dropped for it: the disk's cache is worth more than a copy of a part of it."""
    usage = cache.resources.disk_usage
    await cache.resources.measure_disk()
    if space.file_shortage(file_bytes) > 0:
        raise DiskSpaceError(f"the export of prompt {name!r}", file_bytes, usage.free_bytes, usage.kept_bytes)
    space.keep(file_bytes)


def _copy(spool: Spool, packs: Path, batch: Sequence[BundleChunk], offset: int) -> list[BundleChunk]:
    """Copy chunks from their packs into the spool; return them as they lie there."""
    copies = []
    for chunk, _ in batch:
        copies.append(spool.copy_chunk(packs, chunk, offset))
        offset += chunk.opened().stored_bytes
    return copies
