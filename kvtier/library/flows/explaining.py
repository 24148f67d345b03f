"""From a request, as clients send it, to its tokens; and from tokens that differ to text that people can read."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from kvtier.errors import InvalidArgumentError, RenderError
from kvtier.library.rendering.recipe import check_messages, check_tokens
from kvtier.library.rendering.vllm_client import VllmClient
from kvtier.library.values.outcome_values import ChangeLooksLike, Difference

WINDOW_TOKENS = 16
"""Shown before the first token that differs, and from it on."""
_MONTHS = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
_ID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}|\b[0-9a-f]{12,}\b|\b[a-z0-9_-]{20,}\b"
_DATE = rf"\b\d{{4}}[-/.]\d{{1,2}}|\b\d{{1,2}}[-/.]\d{{1,2}}[-/.]\d{{2,4}}|\b({_MONTHS})[a-z]*\.? +\d|\d +({_MONTHS})"
_LOOKS: Sequence[tuple[ChangeLooksLike, re.Pattern[str]]] = (
    (ChangeLooksLike.ID, re.compile(_ID, re.IGNORECASE)),
    (ChangeLooksLike.DATE, re.compile(_DATE, re.IGNORECASE)),
    (ChangeLooksLike.TIME, re.compile(r"\b\d{1,2}:\d{2}\b|\bT\d{2}:")),
    (ChangeLooksLike.NUMBER, re.compile(r"\d[\d.,]*")),
)


def tokens_of_request(request: Mapping[str, Any], vllm: VllmClient) -> tuple[str, tuple[int, ...]]:
    """Return the served model's name and the prompt's tokens of a chat or completions request.

    Raises:
        InvalidArgumentError: It has neither `messages` nor `prompt`.
        RenderError: vLLM refuses it, or does not answer.
    """
    prompt = request.get("prompt")
    if isinstance(prompt, list) and all(isinstance(each, int) for each in prompt):
        return str(request.get("model") or ""), tuple(check_tokens("prompt", prompt))
    served = [model.name for model in vllm.models()]
    model = str(request.get("model") or (served[0] if served else ""))
    if isinstance(prompt, str):
        return model, tuple(vllm.tokenize_text(model, prompt))
    if "messages" not in request:
        raise InvalidArgumentError("request", sorted(request), "give a request with `messages`, or with `prompt`")
    messages = check_messages("messages", request["messages"])
    kwargs = request.get("chat_template_kwargs")
    return model, tuple(vllm.tokenize_chat(model, messages, request.get("tools"), kwargs))


def difference_of(
    name: str, requested: Sequence[int], pinned: Sequence[int], differs_at: int, model: str, vllm: VllmClient
) -> Difference | None:
    """Return where a request differs from a prompt, as text; None if vLLM cannot say."""
    start, end = max(0, differs_at - WINDOW_TOKENS), differs_at + WINDOW_TOKENS
    with suppress(RenderError):
        before = vllm.detokenize(model, requested[start:differs_at])
        texts = [vllm.detokenize(model, tokens[start:end])[len(before) :] for tokens in (requested, pinned)]
        return Difference(
            name=name,
            before=before,
            in_request=texts[0],
            in_prompt=texts[1],
            looks_like=_looks_like(before, *texts),
        )
    return None


def _looks_like(before: str, *texts: str) -> ChangeLooksLike:
    """Judge both texts with the word in which they begin to differ: what changes is alike on both sides."""
    word = re.search(r"[^\s]*$", before)
    begun = word[0] if word else ""
    for kind, pattern in _LOOKS:
        if all(_begins_in(pattern, begun + text, len(begun)) for text in texts):
            return kind
    return ChangeLooksLike.TEXT


def _begins_in(pattern: re.Pattern[str], text: str, differs_at: int) -> bool:
    """Return whether a match covers the place, or begins within the few characters behind it."""
    return any(match.start() <= differs_at + 4 and match.end() > differs_at for match in pattern.finditer(text))
