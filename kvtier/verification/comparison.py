"""The comparison: the same request with the same number of cached tokens, once from kvtier, once from vLLM itself.

Checksums prove that bytes are those that were stored. They do not prove that these bytes are the KV of these tokens:
a defect before the store, a model that changed under one name, or a mixed-up row has valid checksums. vLLM is the
judge of that: it computes the first N tokens itself, reads them back from its own prefix cache, and computes the rest,
exactly as after a restore of N tokens. So both requests run the same kernels on the same shapes, and differ only in who
brought the KV of the first N tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from kvtier.core.requests.verify_salts import MAX_OWN_SALT_CHARS, new_reference_salt, new_restored_salt
from kvtier.verification.completions import Completer, Completion

NUM_COMPARED = 4
"""Generated tokens: the first depends on the prompt's KV alone, the next ones show that it is read again."""
MAX_ATTEMPTS = 6
"""Answers of each kind. Two that are equal end the comparison: rounding makes no wrong KV right."""
TOLERANCE = 1e-3
"""Largest difference of a logprob that counts as equal.

Alone in the engine, and with KV that was computed alone, both requests give the same bits: 0.0 on the CPU. Beside
other requests the batch has another shape, sums run in another order, and bfloat16 rounds otherwise: 0.06
(tests/e2e/test_verification.py). That is so for the KV, too, which may have been stored by a busy engine. So a
difference above this is weighed against those between vLLM's own answers, whose prefix is computed in other pieces
each time. One wrong chunk of twenty made 1.1.
"""
CLEAR_RATIO = 3.0
"""A difference of more than this many times that between vLLM's own answers is none of rounding."""


class ComparisonVerdict(Enum):
    """The outcome of a comparison."""

    EQUAL = "equal"
    """Same tokens, and logprobs that differ by no more than the tolerance, or than vLLM's own answers do."""
    DIFFERENT = "different"
    """What kvtier restores is not what vLLM computes."""
    INCONCLUSIVE = "inconclusive"
    """The two requests cannot be compared; see `why`."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What was compared.

    Attributes:
        verdict: The outcome.
        why: For people: what differs, or why nothing could be compared; empty if nothing differs.
        restored_tokens: Prompt tokens that kvtier brought; None: vLLM does not say.
        reference_tokens: Prompt tokens that the other request had from vLLM's prefix cache; None: as above, or there
            was none.
        max_difference: Largest difference of a logprob; None: nothing was compared.
        same_tokens: Both generated the same ones.
    """

    verdict: ComparisonVerdict
    why: str = ""
    restored_tokens: int | None = None
    reference_tokens: int | None = None
    max_difference: float | None = None
    same_tokens: bool = False


def compare_live(
    complete: Completer,
    *,
    model: str,
    tokens: Sequence[int],
    own_salt: str = "",
    max_tokens: int = NUM_COMPARED,
    tolerance: float = TOLERANCE,
) -> Comparison:
    """Have a vLLM answer a pinned prompt with kvtier's KV and with its own: three requests, or two dozen.

    Nothing of them is stored, and vLLM's prefix cache keeps nothing that another request could use.

    Args:
        complete: Sends a request. Beside other requests the comparison may be inconclusive.
        model: As vLLM serves it, or the adapter's name.
        tokens: The pinned ones, and one more if the prompt ends where its last chunk does (`warm_tokens`).
        own_salt: The pin's cache salt.
        max_tokens: How many generated tokens are compared.
        tolerance: See `TOLERANCE`.

    Raises:
        KvtierError: vLLM does not answer, or refuses.
    """
    if len(own_salt) > MAX_OWN_SALT_CHARS:
        return _inconclusive(f"the pin's cache salt has more than the {MAX_OWN_SALT_CHARS} characters that fit")
    restored: list[Completion] = []
    references: list[Completion] = []
    for attempt in range(MAX_ATTEMPTS):
        salt = new_restored_salt(own_salt)
        restored.append(complete(model=model, tokens=tokens, cache_salt=salt, max_tokens=max_tokens))
        num_restored = restored[0].cached_tokens or 0
        if why := _why_not_restored(restored):
            return _inconclusive(why, restored[-1].cached_tokens)
        salt = new_reference_salt()
        # The last: one token more, because vLLM always computes the last one, and hits no block that ends with it.
        for end in (num_restored * attempt // MAX_ATTEMPTS, num_restored + 1):
            if end:
                complete(model=model, tokens=tokens[:end], cache_salt=salt, max_tokens=1)
        references.append(complete(model=model, tokens=tokens, cache_salt=salt, max_tokens=max_tokens))
        if (num_cached := references[-1].cached_tokens) != num_restored:
            why = (
                f"kvtier restored {num_restored} tokens, and vLLM's own prefix cache had {num_cached}: other requests "
                "needed its blocks, or the model caches less; try again while vLLM is idle"
            )
            return _inconclusive(why, num_restored, num_cached)
        nearest = min((_judge(one, other, tolerance) for one in restored for other in references), key=_rank)
        if nearest.verdict is not ComparisonVerdict.DIFFERENT:
            return nearest
    own = [_judge(one, references[0], tolerance).max_difference or 0.0 for one in references]
    noise = max((each for each in own if not math.isnan(each)), default=0.0)
    return nearest if noise <= tolerance else _weigh(nearest, noise)


def _weigh(nearest: Comparison, noise: float) -> Comparison:
    """Judge answers of which no two are equal by how much vLLM's own differ from each other."""
    difference = _rank(nearest)[1]
    if difference > CLEAR_RATIO * noise:
        return nearest
    if difference <= noise and nearest.same_tokens:
        why = f"{nearest.why}, and vLLM's own answers by {noise:.3g}: rounding"
        return replace(nearest, verdict=ComparisonVerdict.EQUAL, why=why)
    why = f"{nearest.why}, and vLLM's own answers by {noise:.3g}: too near to say; try again while vLLM is idle"
    return replace(nearest, verdict=ComparisonVerdict.INCONCLUSIVE, why=why)


def _why_not_restored(restored: Sequence[Completion]) -> str:
    """Return why the last answer is not one of a restored prompt; empty: it is."""
    num_first, num_last = restored[0].cached_tokens, restored[-1].cached_tokens
    if num_last is None:
        return "vLLM does not report cached tokens; start it with --enable-prompt-tokens-details"
    if num_last and num_last == num_first:
        return ""
    what = "other tokens than before" if num_last else "nothing"
    return (
        f"kvtier restored {what}: chunks are not held, the daemon does not run or answered late, the namespace is "
        "quarantined, or computing so few tokens is faster; `kvtier doctor` and kvtier_connector_lookups say which"
    )


def _rank(comparison: Comparison) -> tuple[bool, float]:
    """Return what orders comparisons: equal ones first, then by their difference; no number is the largest."""
    difference = comparison.max_difference
    if difference is None or math.isnan(difference):
        difference = math.inf
    return comparison.verdict is ComparisonVerdict.DIFFERENT, difference


def _inconclusive(why: str, restored_tokens: int | None = None, reference_tokens: int | None = None) -> Comparison:
    return Comparison(
        verdict=ComparisonVerdict.INCONCLUSIVE,
        why=why,
        restored_tokens=restored_tokens,
        reference_tokens=reference_tokens,
    )


def _judge(restored: Completion, reference: Completion, tolerance: float) -> Comparison:
    """Compare up to the first token that differs: what follows it belongs to other texts."""
    num_same = _num_same(restored.tokens, reference.tokens)
    same_tokens = num_same == len(reference.tokens) == len(restored.tokens)
    positions = list(zip(restored.logprobs, reference.logprobs, strict=False))[: num_same + 1]
    if not positions:
        return _inconclusive("vLLM generated no token", restored.cached_tokens, reference.cached_tokens)
    difference = max(_difference(one, other) for one, other in positions)
    # NaN is no number that is within a tolerance.
    is_equal = same_tokens and difference <= tolerance
    why = "" if is_equal else f"logprobs differ by up to {difference:.3g}"
    if not same_tokens:
        why += f", and generated token {num_same + 1} is another one"
    return Comparison(
        verdict=ComparisonVerdict.EQUAL if is_equal else ComparisonVerdict.DIFFERENT,
        why=why,
        restored_tokens=restored.cached_tokens,
        reference_tokens=reference.cached_tokens,
        max_difference=difference,
        same_tokens=same_tokens,
    )


def _num_same(one: Sequence[str], other: Sequence[str]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _difference(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Return the largest difference; a token that only one names has, in the other, the least logprob there at most."""
    differences = [abs(value - other[token]) for token, value in one.items() if token in other]
    for here, there in ((one, other), (other, one)):
        least = min(there.values(), default=0.0)
        differences += [max(0.0, value - least) for token, value in here.items() if token not in there]
    return max(differences, key=lambda value: (value != value, value), default=0.0)
