"""What is known of the trust in prompts and of what happens: verification, readiness, events.

As `public_values`: a field that comes from the protocol has the name of the message's field.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier.library.values.plain_json import to_jsonable
from kvtier.library.values.public_values import PromptState
from kvtier.printable import printable_json
from kvtier.verification import Comparison, ComparisonVerdict


@dataclass(frozen=True, kw_only=True)
class VerifiedTier:
    """The chunks of a prompt in one tier.

    Attributes:
        num_missing_chunks: Not in this tier; in host memory that is no fault.
        num_refused_chunks: On disk, and the operating system refused to read them.
        verified_bytes: Of those that were read, not compressed.
    """

    num_verified_chunks: int
    num_damaged_chunks: int
    num_missing_chunks: int
    num_refused_chunks: int
    verified_bytes: int

    @property
    def num_tried_chunks(self) -> int:
        """Chunks that were compared, or that could not be read."""
        return self.num_verified_chunks + self.num_damaged_chunks + self.num_refused_chunks


@dataclass(frozen=True, kw_only=True)
class VerifiedNamespace:
    """A prompt's chunks in one namespace, compared with the checksums that were taken when they were stored.

    Attributes:
        num_lost_chunks: In no tier: they are stored when next computed.
        num_differing_chunks: In both tiers, and not the same bytes: the copy in memory was dropped.
    """

    namespace_id: str
    model: str
    num_chunks: int
    host: VerifiedTier
    disk: VerifiedTier
    num_lost_chunks: int
    num_differing_chunks: int

    @property
    def num_bad_chunks(self) -> int:
        """Damaged, different in two tiers, or not readable."""
        return (
            self.host.num_damaged_chunks
            + self.disk.num_damaged_chunks
            + self.disk.num_refused_chunks
            + self.num_differing_chunks
        )


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """The bytes of a prompt, compared with their checksums."""

    name: str
    namespaces: tuple[VerifiedNamespace, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class VerifyResult:
    """What a verification of a prompt compared, and found; `to_json` makes a report that can be kept.

    Attributes:
        pin_id: Of the prompt that had the name then.
        tokens_digest: Equal for prompts with equal tokens.
        verified_unix_s: When it began.
        daemon_version: Of kvtier.
        vllm_version: Of the vLLM that the live comparison asked; empty: it asked none.
        model: As that vLLM serves it.
        url: Of that vLLM, without secrets.
        checksums: Every chunk on disk and in host memory beside its checksum.
        live: vLLM's answers with KV from kvtier, beside those with KV that it computed itself. None: not wanted.
        live_namespace_ids: Namespaces that the live comparison may have been about: one, unless engines of several
            serve the model.
    """

    name: str
    pin_id: str
    tokens_digest: str
    num_tokens: int
    verified_unix_s: float
    daemon_version: str
    vllm_version: str
    model: str
    url: str
    checksums: VerifyReport
    live: Comparison | None
    live_namespace_ids: tuple[str, ...]

    @property
    def empty(self) -> bool:
        """Whether nothing was compared: no chunk is stored, and vLLM's answers were not compared."""
        num_tried = sum(each.host.num_tried_chunks + each.disk.num_tried_chunks for each in self.checksums.namespaces)
        return not num_tried and (self.live is None or self.live.verdict is ComparisonVerdict.INCONCLUSIVE)

    @property
    def damaged(self) -> bool:
        """Whether some bytes are not those that were stored, or cannot be read."""
        return any(each.num_bad_chunks for each in self.checksums.namespaces)

    @property
    def different(self) -> bool:
        """Whether vLLM answers otherwise with KV from kvtier: it is not that of these tokens."""
        return self.live is not None and self.live.verdict is ComparisonVerdict.DIFFERENT

    @property
    def conclusive(self) -> bool:
        """Whether all that was to be compared was: no chunk is lost, and the live comparison has an outcome."""
        is_whole = not any(each.num_lost_chunks for each in self.checksums.namespaces)
        return is_whole and (self.live is None or self.live.verdict is not ComparisonVerdict.INCONCLUSIVE)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; no token and no text of the prompt is among them."""
        values: dict[str, Any] = to_jsonable(self)
        return {"oracle": "checksums" if self.live is None else "checksums, live vLLM"} | values

    def to_json(self) -> str:
        """Return JSON."""
        return printable_json(self.to_dict(), indent=2)


@dataclass(frozen=True, kw_only=True)
class WaitingPrompt:
    """A prompt that is not ready, and for people, what it waits for."""

    name: str
    state: PromptState
    why: str


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """Whether pinned prompts can be restored now.

    Attributes:
        waiting: At most 100 of those that cannot.
    """

    ready: bool
    num_prompts: int
    num_ready: int
    waiting: tuple[WaitingPrompt, ...]

    @property
    def only_refused(self) -> bool:
        """Whether some are not ready, and vLLM cannot use any of these, so that waiting does not help."""
        is_whole = 0 < self.num_prompts - self.num_ready == len(self.waiting)
        return is_whole and all(each.state is PromptState.REFUSED for each in self.waiting)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that the daemon did.

    Attributes:
        name: As in docs/logs.md, or `dropped`: `events` of them were, because they were read too slowly.
        level: `info`, `warning`, `error` or `critical`.
    """

    name: str
    unix_s: float
    level: str
    fields: Mapping[str, str]
