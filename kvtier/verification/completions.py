"""What a comparison asks of vLLM's `/v1/completions`, and what it reads of the answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvtier.errors import RenderError

TOP_LOGPROBS = 5
"""The default of vLLM's `--max-logprobs` is 20."""
_UNUSABLE = "vLLM answered a completion without logprobs; name the URL of a vLLM, and look at its log"


@dataclass(frozen=True, kw_only=True)
class Completion:
    """An answer of vLLM.

    Attributes:
        tokens: The generated ones, as `token_id:N`.
        logprobs: For each generated token, the most probable tokens and their logprobs.
        cached_tokens: Prompt tokens that vLLM did not compute; None when it does not report that
            (`--enable-prompt-tokens-details`).
    """

    tokens: tuple[str, ...] = field(repr=False)
    logprobs: tuple[Mapping[str, float], ...]
    cached_tokens: int | None


class Completer(Protocol):
    """Sends a completion to a vLLM."""

    def __call__(self, *, model: str, tokens: Sequence[int], cache_salt: str, max_tokens: int) -> Completion:
        """Return the answer to `completion_body` of these, read by `read_completion`.

        Raises:
            KvtierError: vLLM does not answer, or refuses.
        """
        ...


def completion_body(*, model: str, tokens: Sequence[int], cache_salt: str, max_tokens: int) -> dict[str, Any]:
    """Return the JSON to POST: greedy, and tokens by their ids, of which two may have one text."""
    return {
        "model": model,
        "prompt": list(tokens),
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": TOP_LOGPROBS,
        "return_tokens_as_token_ids": True,
        "ignore_eos": True,
        "cache_salt": cache_salt,
    }


def read_completion(answer: Mapping[str, Any]) -> Completion:
    """Read vLLM's answer.

    Raises:
        RenderError: It is no completion with logprobs.
    """
    try:
        found = answer["choices"][0]["logprobs"]
        details = answer["usage"].get("prompt_tokens_details")
        return Completion(
            tokens=tuple(str(token) for token in found["tokens"]),
            logprobs=tuple({str(token): float(value) for token, value in top.items()} for top in found["top_logprobs"]),
            cached_tokens=None if details is None else int(details["cached_tokens"] or 0),
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as exc:
        raise RenderError(_UNUSABLE) from exc
