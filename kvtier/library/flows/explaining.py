"""From a request, as clients send it, to its tokens; and from tokens that differ to text that people can read."""

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from kvtier.errors import InvalidArgumentError, RenderError
from kvtier.library.rendering.recipe import check_messages, check_tokens, check_tools, require_object
from kvtier.library.rendering.vllm_client import VllmClient
from kvtier.library.values.outcome_values import ChangeLooksLike, Difference

WINDOW_TOKENS = 16
"""Shown before the first token that differs, and from it on."""
_UNDECODED = "\ufffd"
"""What vLLM writes for bytes that are no whole character: a window of tokens may begin and end within one."""
_MONTH = "(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
_DAY = r"\d{1,2}(st|nd|rd|th)?"
_DATES = (
    r"(?<!\d)\d{4}[-/.]\d{1,2}([-/.]\d{1,2})?(?!\d)",
    r"(?<!\d)\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}(?!\d)",
    rf"\b{_MONTH}\.? +{_DAY}\b(,? +\d{{4}})?",
    rf"\b{_DAY}\.? +(of +)?{_MONTH}\b(\.?,? +\d{{4}})?",
    rf"\b{_MONTH}\.?,? +\d{{4}}",
    r"\b(mon|tues|wednes|thurs|fri|satur|sun)day\b",
)
_ID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}|\b[0-9a-f]{12,}\b|\b[a-z0-9_-]{20,}\b"
_FIELDS_OF_OTHERS = {"system": "/v1/messages", "input": "/v1/responses", "instructions": "/v1/responses"}
_LOOKS: Sequence[tuple[ChangeLooksLike, re.Pattern[str]]] = (
    (ChangeLooksLike.ID, re.compile(_ID, re.IGNORECASE)),
    (ChangeLooksLike.DATE, re.compile("|".join(_DATES), re.IGNORECASE)),
    (ChangeLooksLike.TIME, re.compile(r"(?<!\d)\d{1,2}:\d{2}(:\d{2})?")),
    (ChangeLooksLike.NUMBER, re.compile(r"\d[\d.,]*")),
)


def tokens_of_request(request: Mapping[str, Any], vllm: VllmClient) -> tuple[str, tuple[int, ...]]:
    """Return the served model's name and the prompt's tokens of a chat or completions request.

    Raises:
        InvalidArgumentError: It has neither `messages` nor one `prompt`, or is one of another API, or one of its fields
            is of another kind.
        RenderError: vLLM refuses it, or does not answer.
    """
    if not isinstance(request, Mapping):
        raise InvalidArgumentError("request", type(request).__name__, "must be an object with `messages` or `prompt`")
    prompt = request.get("prompt")
    if isinstance(prompt, list) and not any(isinstance(each, str | list) for each in prompt):
        return str(request.get("model") or ""), tuple(check_tokens("prompt", prompt))
    served = [model.name for model in vllm.models()]
    model = str(request.get("model") or (served[0] if served else ""))
    if isinstance(prompt, str):
        return model, tuple(vllm.tokenize_text(model, prompt))
    for field, endpoint in _FIELDS_OF_OTHERS.items():
        if request.get(field):
            remedy = f"is a field of {endpoint}; give the request as a chat, its system prompt first of the `messages`"
            raise InvalidArgumentError(field, request[field], remedy)
    if "messages" not in request:
        remedy = "give a request with `messages`, or with one `prompt`, as text or as token ids"
        raise InvalidArgumentError("request", sorted(request), remedy)
    messages, tools = request["messages"], request.get("tools")
    check_messages("messages", messages)
    if tools:
        check_tools("tools", tools)
    return model, tuple(vllm.tokenize_chat(model, messages, tools, _template_kwargs(request)))


def _template_kwargs(request: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what the chat template is given, as `ChatCompletionRequest.build_chat_params` of vLLM 0.32 merges it."""
    kwargs, effort = request.get("chat_template_kwargs"), request.get("reasoning_effort")
    if kwargs is not None:
        require_object("chat_template_kwargs", kwargs)
    if effort is None:
        return kwargs
    return {"enable_thinking": effort != "none", **(kwargs or {}), "reasoning_effort": effort}


def difference_of(
    name: str, requested: Sequence[int], pinned: Sequence[int], differs_at: int, model: str, vllm: VllmClient
) -> Difference | None:
    """Return where a request differs from a prompt, as text; None if vLLM cannot say.

    Args:
        name: Of the prompt.
        requested: Tokens of the request; `pinned`: of the prompt.
        differs_at: Index of the first token that differs.
        model: Served by `vllm`.
        vllm: Knows the tokenizer.
    """
    start, end = max(0, differs_at - WINDOW_TOKENS), differs_at + WINDOW_TOKENS
    try:
        before = vllm.detokenize(model, requested[start:differs_at])
        texts = [vllm.detokenize(model, tokens[start:end]) for tokens in (requested, pinned)]
    except RenderError:
        return None
    # A character may have bytes on both sides of the place: it is one only in the text of all tokens.
    before = _shared_head(before, *texts)
    rests = [text[len(before) :].rstrip(_UNDECODED) for text in texts]
    return Difference(
        name=name,
        before=before.lstrip(_UNDECODED),
        in_request=rests[0],
        in_prompt=rests[1],
        looks_like=_looks_like(before, *rests),
    )


def _looks_like(before: str, *rests: str) -> ChangeLooksLike:
    """Judge both texts by what lies around their first differing character: what changes is alike on both sides."""
    place = len(before) + len(_shared_head(*rests))
    for kind, pattern in _LOOKS:
        ends = [_end_of_match(pattern, before + rest, place) for rest in rests]
        if min(ends) >= place and max(ends) > place:  # of 12 and 123 one ends where the other goes on
            return kind
    return ChangeLooksLike.TEXT


def _end_of_match(pattern: re.Pattern[str], text: str, place: int) -> int:
    """Return where the last match ends that begins before a place or, but for punctuation, at it; -1: there is none."""
    matches = (
        each for each in pattern.finditer(text) if not any(map(str.isalnum, text[place : max(place, each.start())]))
    )
    return max((each.end() for each in matches), default=-1)


def _shared_head(*texts: str) -> str:
    """Return the characters with which all texts begin."""
    return "".join(each[0] for each in takewhile(lambda each: len(set(each)) == 1, zip(*texts, strict=False)))
