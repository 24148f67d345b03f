"""What one request got from caches, and why not more: judged once, when vLLM first allocates memory for it."""

from dataclasses import dataclass

from kvtier.core.requests.request_outcomes import RequestOutcome
from kvtier_connector.outcomes.pin_index import PinShare


@dataclass(kw_only=True)
class RequestAccount:
    """Scheduler thread only.

    Attributes:
        share: What the request shares with a pin; None: nothing, or it was not looked for yet.
        lookup: What its last lookup round says of the outcome, HIT if all that was asked for can be loaded, or was in
            vLLM's prefix cache; None: there was no round.
        device_tokens: Of the prompt, in vLLM's prefix cache when it was last looked up.
        matched_tokens: Beyond those, that kvtier offered to load then.
        num_loaded_chunks: Chunks that are loaded for it.
        num_disk_chunks: Of these, those that were read from disk for it.
        host_tokens: Of the prompt, loaded from host memory; set by `admitted`, as the next two.
        disk_tokens: Loaded after they were read from disk.
        outcome: The judgement; None before vLLM has allocated.
    """

    share: PinShare | None = None
    lookup: RequestOutcome | None = None
    device_tokens: int = 0
    matched_tokens: int = 0
    num_loaded_chunks: int = 0
    num_disk_chunks: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    outcome: RequestOutcome | None = None

    @property
    def loaded_tokens(self) -> int:
        """Tokens that kvtier restored."""
        return self.host_tokens + self.disk_tokens

    def admitted(
        self,
        num_external_tokens: int,
        reachable_tokens: int,
        ruled_out: RequestOutcome | None,
        dropped_tokens: int = 0,
    ) -> None:
        """vLLM has allocated; what comes after a preemption is not counted.

        Args:
            num_external_tokens: That are loaded.
            reachable_tokens: Of the prompt, in whole chunks without its last token.
            ruled_out: Why no cache could serve it, whatever was there.
            dropped_tokens: At the end of each hit, which vLLM computes again for a draft model.
        """
        if self.num_disk_chunks:
            self.disk_tokens = round(num_external_tokens * self.num_disk_chunks / self.num_loaded_chunks)
        self.host_tokens = num_external_tokens - self.disk_tokens
        if reachable_tokens <= dropped_tokens:
            self.outcome = RequestOutcome.TOO_SHORT
        else:
            self.outcome = ruled_out or self._judge(reachable_tokens, dropped_tokens)

    def _judge(self, reachable_tokens: int, dropped_tokens: int) -> RequestOutcome:
        share, lookup = self.share, self.lookup or RequestOutcome.NO_SESSION
        # Where another connector of a MultiConnector loads, in our place: what we would have loaded.
        loaded_tokens = self.loaded_tokens or self.matched_tokens
        cached_tokens = self.device_tokens + loaded_tokens
        if share is None or (loaded_tokens and cached_tokens > share.num_tokens):
            # Nothing pinned, or unpinned chunks behind it (`cache.store = "all"`).
            if loaded_tokens:
                return RequestOutcome.HIT if lookup is RequestOutcome.HIT else RequestOutcome.PART
            # What is held may end too soon for any hit: before a draft model's second chunk, or a window.
            return RequestOutcome.UNKNOWN if lookup is RequestOutcome.HIT and not cached_tokens else lookup
        if not (share.is_whole or share.ends_inside):
            return RequestOutcome.DIVERGED
        if cached_tokens and cached_tokens >= min(share.num_tokens, reachable_tokens) - dropped_tokens:
            return RequestOutcome.HIT
        if loaded_tokens:
            return RequestOutcome.PART
        if lookup in (RequestOutcome.HIT, RequestOutcome.UNKNOWN, RequestOutcome.DIVERGED, RequestOutcome.TOO_SHORT):
            return RequestOutcome.NOT_STORED  # there was nothing to ask for
        return lookup

    def load_failed(self) -> None:
        """vLLM computes what was to be loaded."""
        if self.outcome is not None:
            self.outcome = RequestOutcome.LOAD_FAILED
            self.host_tokens = self.disk_tokens = 0
