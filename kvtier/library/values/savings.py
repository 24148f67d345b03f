"""What kvtier has saved: sums of what the daemon counts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtier.library.values.outcome_values import PinUsage, RequestOutcome
from kvtier.library.values.public_values import DaemonStatus, Prompt

_LISTED = 100


@dataclass(frozen=True, kw_only=True)
class PromptSavings:
    """What one prompt saved since it was pinned."""

    name: str
    owner: str
    usage: PinUsage


@dataclass(frozen=True, kw_only=True)
class Savings:
    """What requests got, and what that saved.

    Attributes:
        since_unix_s: The start of the daemon, from which the next three count.
        requests: By outcome, without those that are 0.
        prompt_tokens: Of these requests, by where they came from: `device` (vLLM's own prefix cache), `host`, `disk`,
            `computed`.
        saved_prefill_s: Seconds of prefill for the tokens of host and disk; what loading them took is not subtracted.
        pins_saved_prefill_s: Of the prompts that there are, since each was pinned; `pins_restored_tokens` likewise.
        prompts: The hundred that saved most.
    """

    since_unix_s: float
    requests: Mapping[str, int]
    prompt_tokens: Mapping[str, int]
    saved_prefill_s: float
    pins_num_hits: int
    pins_restored_tokens: int
    pins_saved_prefill_s: float
    prompts: tuple[PromptSavings, ...]


def savings_of(status: DaemonStatus, prompts: Sequence[Prompt]) -> Savings:
    """Return the sums of a daemon and of its prompts."""
    counters = status.counters
    requests = {outcome.name: counters.get(f"requests_{outcome.value}", 0) for outcome in RequestOutcome}
    sources = ("device", "host", "disk", "computed")
    used = [each for each in prompts if each.usage.last_used_unix_s]
    used.sort(key=lambda each: each.usage.saved_prefill_s, reverse=True)
    return Savings(
        since_unix_s=status.started_unix_s,
        requests={name: num for name, num in requests.items() if num},
        prompt_tokens={source: counters.get(f"prompt_tokens_{source}", 0) for source in sources},
        saved_prefill_s=counters.get("saved_prefill_seconds", 0),
        pins_num_hits=sum(each.usage.num_hits for each in used),
        pins_restored_tokens=sum(each.usage.restored_tokens for each in used),
        pins_saved_prefill_s=sum(each.usage.saved_prefill_s for each in used),
        prompts=tuple(PromptSavings(name=each.name, owner=each.owner, usage=each.usage) for each in used[:_LISTED]),
    )
