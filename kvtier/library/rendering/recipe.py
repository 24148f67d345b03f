"""The source of a prompt, stored as a recipe, so that it can be rendered again.

A recipe is JSON: `{"version": 1, "kind": "system", "content": "You are ...", "tools": [...]}`. One that names
`chat_template_kwargs` has version 2: a kvtier that ignores them would render other tokens without an error.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvtier.core.limits import RECIPE
from kvtier.errors import InvalidArgumentError, RenderError
from kvtier.json_text import JsonError, read_json
from kvtier.library.rendering.field_names import PYTHON_NAMES, FieldNames
from kvtier.library.rendering.vllm_client import is_token

RECIPE_VERSION = 2
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")
KWARGS_EXAMPLE = """a JSON object like '{"enable_thinking": false}'"""


class SourceKind(StrEnum):
    SYSTEM = "system"
    MESSAGES = "messages"
    TEXT = "text"
    TOKENS = "tokens"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A prompt before rendering.

    Attributes:
        kind: Which input of vLLM it is.
        content: Text (system, text), a list of messages, or None for token ids, which are stored as tokens.
        tools: OpenAI tools, passed on unchanged.
        chat_template_kwargs: The kwargs that requests send, passed on unchanged.
    """

    kind: SourceKind
    content: Any = field(default=None, repr=False)
    tools: list[Any] | None = field(default=None, repr=False)
    chat_template_kwargs: dict[str, Any] | None = None

    def to_json(self) -> str:
        """Return the stored form. InvalidArgumentError: it is longer than a prompt's source may be."""
        fields: dict[str, Any] = {"version": 1, "kind": self.kind.value}
        fields |= {"content": self.content} if self.content is not None else {}
        fields |= {"tools": self.tools} if self.tools else {}
        if self.chat_template_kwargs:
            fields |= {"version": RECIPE_VERSION, "chat_template_kwargs": self.chat_template_kwargs}
        text = json.dumps(fields, ensure_ascii=False)
        num_bytes = len(text.encode(errors="surrogatepass"))
        if num_bytes > RECIPE.max_bytes:  # beyond what gRPC takes it would refuse it, and name no field
            raise InvalidArgumentError(
                self.kind.value, f"{num_bytes} bytes", f"with tools and kwargs at most {RECIPE.max_bytes} are supported"
            )
        return text

    @classmethod
    def from_json(cls, text: str) -> "Recipe":
        """Return the recipe of a stored form. RenderError: this kvtier cannot read it."""
        try:
            return cls.from_values(read_json(text))
        except JsonError as exc:
            raise RenderError(_unreadable(PYTHON_NAMES)) from exc

    @classmethod
    def from_values(cls, fields: Any, names: FieldNames = PYTHON_NAMES) -> "Recipe":
        """Return the recipe of a stored form's JSON values. RenderError: this kvtier cannot read it."""
        try:
            if fields["version"] > RECIPE_VERSION:
                raise RenderError(f"the recipe has version {fields['version']}, this kvtier knows {RECIPE_VERSION}")
            kind, content = SourceKind(fields["kind"]), fields.get("content")
            tools, kwargs = fields.get("tools"), fields.get("chat_template_kwargs")
            if kind is SourceKind.MESSAGES:
                check_messages("content", content)
            elif kind is not SourceKind.TOKENS and not isinstance(content, str):
                raise ValueError(content)  # noqa: TRY301
            return cls(
                kind=kind,
                content=content,
                tools=check_tools("tools", tools) if tools is not None else None,
                chat_template_kwargs=require_object("chat_template_kwargs", kwargs) if kwargs is not None else None,
            )
        except (ValueError, KeyError, TypeError, AttributeError, InvalidArgumentError) as exc:
            raise RenderError(_unreadable(names)) from exc

    def messages(self) -> list[Any]:
        """Return the chat messages of a system or messages recipe."""
        if self.kind is SourceKind.SYSTEM:
            return [{"role": "system", "content": self.content}]
        return list(self.content)


def _unreadable(names: FieldNames) -> str:
    return f"the stored recipe cannot be read; pin again with {names['system']}, {names['messages']} or {names['text']}"


def recipe_of(
    *,
    system: str | None = None,
    messages: Sequence[Mapping[str, Any]] | None = None,
    text: str | None = None,
    tokens: Iterable[int] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[Recipe, tuple[int, ...]] | None:
    """Return the recipe of arguments and, for token ids, the tokens; None when no source is given.

    Raises:
        InvalidArgumentError: Several sources are given, or one that cannot be sent.
    """
    sources = {"system": system, "messages": messages, "text": text, "tokens": tokens}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) > 1:
        raise InvalidArgumentError(given[1], "...", f"cannot go with {given[0]}; give one source")
    kind = SourceKind(given[0]) if given else None
    for name, value in {"tools": tools, "chat_template_kwargs": chat_template_kwargs}.items():
        if value is not None and kind not in (SourceKind.SYSTEM, SourceKind.MESSAGES):
            raise InvalidArgumentError(name, "...", "goes with system or messages only")
    content: Any
    match kind:
        case None:
            return None
        case SourceKind.TOKENS:
            return Recipe(kind=kind), listed_tokens(tokens)
        case SourceKind.MESSAGES:
            content = check_messages("messages", _sendable("messages", messages))
        case _:
            content = _check_text(kind, sources[kind])
    kwargs = _sendable("chat_template_kwargs", chat_template_kwargs)
    return Recipe(
        kind=kind,
        content=content,
        tools=check_tools("tools", _sendable("tools", tools)) if tools else None,
        chat_template_kwargs=None if kwargs is None else require_object("chat_template_kwargs", kwargs),
    ), ()


def _check_text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidArgumentError(field, type(value).__name__, "must be text")
    if problem := text_problem(_sendable(field, value)):
        raise InvalidArgumentError(field, "...", problem)
    return value


def text_problem(text: str) -> str:
    """Return what keeps text from being pinned; empty: nothing."""
    if text.startswith("\ufeff"):
        return "begins with a byte order mark, which requests do not send; save it as UTF-8 without one"
    return "" if text.strip() else "is empty; there is nothing to pin"


def _sendable(field: str, value: Any) -> Any:
    """Return a copy as JSON brings it."""
    try:
        if value is None:
            return None
        if isinstance(value, str):  # a copy of a long text would be the same
            value.encode()
            return value
        return read_json(json.dumps(value))
    except (JsonError, TypeError, ValueError, RecursionError) as exc:
        raise InvalidArgumentError(field, type(value).__name__, str(exc)) from exc


def check_messages(field: str, value: Any, path: str = "") -> list[Any]:
    """Return chat messages.

    Errors quote what is wrong in the file that an operator named; without a path they may be logged, and quote nothing.
    """
    messages = _require_list(field, path, value, 'a JSON list like [{"role": "system", "content": "..."}]')
    for index, message in enumerate(messages):
        place = f"{field}[{index}]"
        if not isinstance(message, dict):
            raise InvalidArgumentError(place, _quoted(message, path), 'must be an object with "role" and "content"')
        role, content = message.get("role"), message.get("content")
        if role not in KNOWN_ROLES:
            raise InvalidArgumentError(f"{place}.role", role, f"must be one of {', '.join(KNOWN_ROLES)}")
        if not isinstance(content, str | list) and not (role == "assistant" and content is None):
            shown = _quoted(content, path)
            raise InvalidArgumentError(f"{place}.content", shown, "must be text, or a list of content parts")
    return messages


def check_tools(field: str, value: Any, path: str = "") -> list[Any]:
    """Return OpenAI tools; vLLM checks their content. `path`: see check_messages."""
    tools = _require_list(field, path, value, 'a JSON list like [{"type": "function", "function": {...}}]')
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            problem = "must be an object like the OpenAI API's tools"
            raise InvalidArgumentError(f"{field}[{index}]", _quoted(tool, path), problem)
    return tools


def check_tokens(field: str, value: Any, path: str = "") -> list[int]:
    """Return token ids. `path`: see check_messages."""
    tokens = _require_list(field, path, value, 'a JSON list of token ids like [1, 3087], or {"tokens": [1, 3087]}')
    for index, token in enumerate(tokens):
        if not is_token(token):
            raise InvalidArgumentError(f"{field}[{index}]", token, "must be a token id, a whole number from 0")
    return tokens


def listed_tokens(value: Any) -> tuple[int, ...]:
    """Return the token ids of the argument `tokens`."""
    return tuple(check_tokens("tokens", list(value) if isinstance(value, Iterable) else value))


def _quoted(value: Any, path: str) -> Any:
    return value if path else _json_kind(value)


def _require_list(field: str, path: str, value: Any, example: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else _json_kind(value)
        raise InvalidArgumentError(field, path or "...", f"holds {found}; it must hold {example}")
    return value


def require_object(field: str, value: Any) -> dict[str, Any]:
    """Return chat template kwargs; the template checks their content."""
    if not isinstance(value, dict):
        raise InvalidArgumentError(field, value, f"is {_json_kind(value)}; it must be {KWARGS_EXAMPLE}")
    return value


def _json_kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")
