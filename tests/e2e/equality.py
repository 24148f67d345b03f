"""The oracle: what makes a restored answer right. A comparison that compares nothing fails."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.e2e.harness import TELLS_TIERS, TIERS, Answer


@dataclass
class Comparisons:
    """Compares, counts what was compared, and says so through `note`."""

    note: Callable[[str], None]
    num_answers: int = 0
    num_logprobs: int = 0
    num_near: int = 0
    num_chunks: int = 0

    def restored_equals_prefix_cache_hit(
        self, restored: Answer, reference: Answer, tier: str | None = None, *, omitted_tokens: int = 0
    ) -> None:
        """Check that a restored prefix gives the logprobs of vLLM's prefix-cache hit of the same length, exactly.

        Args:
            restored: Of a request that was alone in the engine.
            reference: Of the same request, its prefix from vLLM's prefix cache.
            tier: Where the prefix must have come from; None: any of kvtier's tiers.
            omitted_tokens: Of the prefix, what no layer looks back to: it is not loaded, and vLLM counts it apart.
        """
        tiers = (tier,) if tier and TELLS_TIERS else TIERS
        assert reference.by_source["device"] == reference.cached_tokens > 0, reference
        assert restored.by_source["external_unspecified"] == omitted_tokens, restored
        assert sum(restored.by_source[each] for each in tiers) + omitted_tokens == restored.cached_tokens, restored
        assert restored.cached_tokens == reference.cached_tokens, (restored.by_source, reference.by_source)
        self.same_logprobs(restored, reference)

    def same_logprobs(self, one: Answer, other: Answer) -> None:
        """Check that two answers agree in every logprob."""
        num_values = sum(len(position) for position in one.logprobs)
        assert num_values > len(one.logprobs) > 0, "nothing to compare"
        assert one.logprobs == other.logprobs
        self.num_answers += 1
        self.num_logprobs += num_values

    def same_tokens(self, one: Answer, other: Answer, *, num_tokens: int | None = None) -> None:
        """Check that two answers agree, though their prompts were computed in steps of other sizes.

        Args:
            one: An answer.
            other: Another.
            num_tokens: How many tokens to compare, without their text: where requests run together, rounding may decide
                between two tokens that are as probable. None: all.
        """
        assert num_tokens is not None or one.text == other.text
        assert len(one.logprobs) == len(other.logprobs) > 0, "nothing to compare"
        for ours, theirs in list(zip(one.logprobs, other.logprobs, strict=True))[:num_tokens]:
            both = ours.keys() & theirs.keys()
            assert len(both) >= len(ours) - 1, (ours, theirs)
            assert all(abs(ours[token] - theirs[token]) < 0.1 for token in both), (ours, theirs)
            self.num_near += len(both)
        self.num_answers += 1

    def same_bytes(self, before: dict[tuple[str, bytes], int], after: dict[tuple[str, bytes], int]) -> None:
        """Check that the same chunks hold the same bytes, by the xxh3 of their raw KV (`Stack.stored_checksums`)."""
        assert len(before) > 0, "nothing to compare"
        assert after == before, f"{sum(after.get(key) != checksum for key, checksum in before.items())} chunks differ"
        self.num_chunks += len(before)

    def report(self) -> None:
        """Say how much was compared."""
        if self.num_answers:
            near = f", {self.num_near} closer than 0.1" if self.num_near else ""
            self.note(f"{self.num_answers} answers compared, {self.num_logprobs} logprobs, all equal{near}")
        if self.num_chunks:
            self.note(f"{self.num_chunks} chunks compared byte by byte (xxh3), all equal")
