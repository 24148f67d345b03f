"""Which chunks of a request are worth asking the daemon for. Dict lookups only; most requests cost one."""

from collections.abc import Sequence

from kvtier.core.layout import ChunkKey
from kvtier_connector.keys import GroupShape
from kvtier_connector.lease import AcquirePlan
from kvtier_connector.pins import PinMirror


class AcquirePlanner:
    """Chooses the keys of an Acquire from vLLM's block hashes and the mirror of the pins."""

    def __init__(self, groups: Sequence[GroupShape], mirror: PinMirror) -> None:
        self._full = tuple(group for group in groups if not group.window_chunks)
        self._windowed = tuple(group for group in groups if group.window_chunks)
        self._mirror = mirror

    def first_key(self, hashes: Sequence[bytes], digest: bytes | None) -> ChunkKey | None:
        """Return the pinned key by which the request is recognized, or None when it belongs to no pin.

        With full attention that is its first chunk. Without, pins consist of last windows only: every chunk is tried.
        """
        group = self._full[0] if self._full else self._windowed[0]
        for chunk_idx in range(min(1, group.num_chunks(hashes)) if self._full else group.num_chunks(hashes)):
            key = group.key(hashes, chunk_idx, digest)
            if self._mirror.knows(key):
                return key
        return None

    def plan(self, hashes: Sequence[bytes], digest: bytes | None, num_computed_tokens: int) -> AcquirePlan | None:
        """Return what to ask beyond vLLM's own hit, or None when nothing that may be held could extend it.

        Args:
            hashes: The request's block hashes.
            digest: Of its LoRA adapter.
            num_computed_tokens: vLLM's own prefix hit.
        """
        num_tokens = max(group.num_chunks(hashes) * group.chunk_tokens for group in self._full + self._windowed)
        end_token, keys, num_prefix_keys = num_tokens, [], 0
        for group in self._full:
            run = self._held_run(group, hashes, digest, num_computed_tokens)
            if not run:
                return None
            end_token = min(end_token, (num_computed_tokens // group.chunk_tokens + len(run)) * group.chunk_tokens)
            num_prefix_keys = num_prefix_keys or len(run)
            keys.extend(run)
        for group in self._windowed:
            held = self._held_chunks(group, hashes, digest, num_computed_tokens, end_token)
            if not held:
                return None
            keys.extend(held)
        chunk_tokens = (self._full or self._windowed)[0].chunk_tokens
        first_token = num_computed_tokens // chunk_tokens * chunk_tokens
        return AcquirePlan(tuple(keys), num_prefix_keys, chunk_tokens, first_token, end_token)

    def pinned_prefix(self, hashes: Sequence[bytes], digest: bytes | None, num_tokens: int) -> list[ChunkKey]:
        """Return the pinned chunks within the first `num_tokens` tokens."""
        keys: list[ChunkKey] = []
        for group in self._full + self._windowed:
            num_chunks = min(num_tokens // group.chunk_tokens, group.num_chunks(hashes))
            candidates = (group.key(hashes, chunk_idx, digest) for chunk_idx in range(num_chunks))
            keys.extend(key for key in candidates if self._mirror.knows(key))
        return keys

    def _held_run(
        self, group: GroupShape, hashes: Sequence[bytes], digest: bytes | None, num_computed_tokens: int
    ) -> list[ChunkKey]:
        run: list[ChunkKey] = []
        for chunk_idx in range(num_computed_tokens // group.chunk_tokens, group.num_chunks(hashes)):
            key = group.key(hashes, chunk_idx, digest)
            if not self._mirror.may_be_held(key):
                break
            run.append(key)
        return run

    def _held_chunks(
        self, group: GroupShape, hashes: Sequence[bytes], digest: bytes | None, num_computed_tokens: int, end_token: int
    ) -> list[ChunkKey]:
        end = min(-(-end_token // group.chunk_tokens), group.num_chunks(hashes))
        first = num_computed_tokens // group.chunk_tokens
        candidates = (group.key(hashes, chunk_idx, digest) for chunk_idx in range(first, end))
        return [key for key in candidates if self._mirror.may_be_held(key)]
