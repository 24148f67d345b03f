"""`kvtier.Client`: everything that the command line does, as methods.

To add one, write it here or in `prompt_calls`, and name it in `async_client` and docs/python.md; tests remind of both.
"""

import builtins
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from kvtier._pb import cache_pb2 as pb
from kvtier.core.limits import Whole
from kvtier.errors import InvalidArgumentError
from kvtier.library.access_calls import AccessCalls
from kvtier.library.flows.bundle_files import bundle_pieces, check_target, sealed_pieces, write_bundle
from kvtier.library.progress_events import OnProgress, Transferred, ignore
from kvtier.library.values.conversion import checked_message, from_message, prompt_of
from kvtier.library.values.public_values import Advice, DaemonStatus, FsckReport, Namespace, Prompt
from kvtier.sealing import load_key_ring

_NUM_BYTES = Whole(0, 2**64 - 1)


class Client(AccessCalls):
    """A client of one daemon, and of one vLLM; a context manager. Threads may share it.

    It connects with the first call, and again after a restart of the daemon. Calls that only read are tried once more
    if the daemon restarts under them, except `export`, `fsck`, `verify` and watches; those that change something never
    are.

    Every method raises DaemonUnreachableError when no daemon answers, UntrustedSocketError when another user could, and
    RemoteError when the daemon refuses: then it is also of the class in `kvtier.errors` that fits, for example
    PromptNotFoundError. Methods that need vLLM (`pin`, `warm`) raise RenderError when it does not answer or refuses.
    """

    def advise(self, *, max_bytes: int = 0) -> Advice:
        """Return what is worth a pin by live traffic, on at most `max_bytes` of disk; 0: those of automatic pins.

        Raises:
            InvalidArgumentError: The number is out of range.
        """
        _NUM_BYTES.check(self._NAMES["max_bytes"], max_bytes)
        return from_message(Advice, self._read(lambda: self._daemon.advise(max_bytes)))

    def status(self) -> DaemonStatus:
        """Return the daemon's status; its namespaces have no fingerprint, `namespaces` has it."""
        return from_message(DaemonStatus, self._read(self._daemon.status))

    def namespaces(self) -> builtins.list[Namespace]:
        """Return every namespace with its fingerprint, by id."""
        return [from_message(Namespace, each) for each in self._read(self._daemon.namespaces)]

    def fsck(self, *, repair: bool = False, deep: bool = False) -> FsckReport:
        """Let the daemon compare ledger, packs and arenas while it serves.

        Args:
            repair: Make them agree; no intact chunk is deleted.
            deep: Read and verify every stored byte, which takes as long as the disk needs.
        """
        return from_message(FsckReport, self._daemon.fsck(pb.FsckRequest(repair=repair, deep=deep)))

    def export(
        self,
        name: str,
        file: Path | str | BinaryIO,
        *,
        namespace_id: str = "",
        decoded: bool = False,
        overwrite: bool = False,
        key_file: Path | str | None = None,
        on_progress: OnProgress = ignore,
    ) -> int:
        """Write a prompt with its KV cache into a safetensors file, for `import_bundle` on another machine.

        Args:
            name: Of a durable prompt. The file holds its text.
            file: A path, at which a whole file is or none, readable by this user only; or an open binary file.
            namespace_id: Which, if the prompt is durable in several.
            decoded: Write the KV as plain tensors for a notebook; no import takes them.
            overwrite: Replace a regular file at the path.
            key_file: Seal the file with the first key of this file; see docs/encryption.md.
            on_progress: Called with Transferred.

        Returns:
            The bytes written.

        Raises:
            PromptNotDurableError: It is not whole on disk, or in several namespaces.
            InvalidArgumentError: The file cannot be written.
            ConfigError: The file of keys cannot be used.
        """
        ring = load_key_ring(Path(key_file), self._NAMES["key_file"], "argument") if key_file is not None else None
        target = Path(file) if isinstance(file, Path | str) else None
        if target is not None:
            check_target(target, self._NAMES, overwrite=overwrite)

        def pieces() -> Iterator[bytes]:
            request = pb.ExportRequest(name=name, namespace_id=namespace_id, decoded=decoded)
            for piece in self._daemon.export(request):
                yield piece
                on_progress(Transferred(num_bytes=len(piece)))

        content = pieces() if ring is None else sealed_pieces(pieces(), ring)
        if target is not None:
            return write_bundle(content, target, self._NAMES, overwrite=overwrite)
        assert not isinstance(file, Path | str)
        num_bytes = sum(file.write(piece) for piece in content)
        file.flush()
        return num_bytes

    def import_bundle(
        self,
        file: Path | str | BinaryIO,
        *,
        name: str = "",
        replace: bool = False,
        ttl_s: int = 0,
        public: bool = False,
        key_file: Path | str | None = None,
        on_progress: OnProgress = ignore,
    ) -> Prompt:
        """Pin a prompt from a file that `export` has written; vLLM computes nothing.

        Args:
            file: A path, or a binary file to read to its end.
            name: Empty: the name in the file.
            replace: Replace another prompt of that name.
            ttl_s: As in `pin`; `public` too.
            public: See above.
            key_file: Has the key of a sealed file.
            on_progress: Called with Transferred.

        Raises:
            BundleDamagedError: It is no whole, undamaged bundle.
            NamespaceMismatchError: No vLLM with the same model and settings has attached yet.
        """
        if isinstance(file, Path | str):
            with open_bundle(Path(file), self._NAMES["file"]) as source:
                return self.import_bundle(
                    source,
                    name=name,
                    replace=replace,
                    ttl_s=ttl_s,
                    public=public,
                    key_file=key_file,
                    on_progress=on_progress,
                )
        keys = Path(key_file) if key_file is not None else None

        def pieces() -> Iterator[bytes]:
            for piece in bundle_pieces(file, keys, self._NAMES):
                yield piece
                on_progress(Transferred(num_bytes=len(piece)))

        start = checked_message(pb.ImportStart, name=name, replace=replace, ttl_s=ttl_s, public=public)
        return prompt_of(self._daemon.import_bundle(start, pieces()))


def open_bundle(file: Path, field: str) -> BinaryIO:
    """Open a file for reading; InvalidArgumentError names it by `field`."""
    try:
        return file.open("rb")
    except (OSError, ValueError) as exc:
        raise InvalidArgumentError(field, str(file), f"cannot be read: {getattr(exc, 'strerror', exc)}") from exc
