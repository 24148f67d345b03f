"""The source of a prompt, read from files and stored as a recipe, so that it can be rendered again.

A recipe is JSON: `{"version": 1, "kind": "system", "content": "You are ...", "tools": [...]}`. One that names
`chat_template_kwargs` has version 2: a kvtier that ignores them would render other tokens without an error.
"""

import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvtier.cli.json_text import JsonError, read_json
from kvtier.cli.vllm_client import is_token
from kvtier.errors import InvalidArgumentError, RenderError

RECIPE_VERSION = 2
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_SOURCE_BYTES = 256 * 1024**2
_KWARGS_EXAMPLE = """a JSON object like '{"enable_thinking": false}'"""


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
    content: Any = None
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def to_json(self) -> str:
        """Return the stored form."""
        fields: dict[str, Any] = {"version": 1, "kind": self.kind.value}
        fields |= {"content": self.content} if self.content is not None else {}
        fields |= {"tools": self.tools} if self.tools else {}
        if self.chat_template_kwargs:
            fields |= {"version": RECIPE_VERSION, "chat_template_kwargs": self.chat_template_kwargs}
        return json.dumps(fields, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "Recipe":
        """Return the recipe of a stored form. RenderError: this kvtier cannot read it."""
        try:
            fields = read_json(text)
            if fields["version"] > RECIPE_VERSION:
                raise RenderError(f"the recipe has version {fields['version']}, this kvtier knows {RECIPE_VERSION}")
            kind, content = SourceKind(fields["kind"]), fields.get("content")
            tools, kwargs = fields.get("tools"), fields.get("chat_template_kwargs")
            if kind is SourceKind.MESSAGES:
                _check_messages("content", content)
            elif kind is not SourceKind.TOKENS and not isinstance(content, str):
                raise ValueError(content)  # noqa: TRY301
            return cls(
                kind=kind,
                content=content,
                tools=_checked_tools("tools", tools) if tools is not None else None,
                chat_template_kwargs=_require_object("chat_template_kwargs", kwargs) if kwargs is not None else None,
            )
        except (ValueError, KeyError, TypeError, AttributeError, InvalidArgumentError) as exc:
            raise RenderError(
                "the stored recipe cannot be read; pin again with --system, --messages or --text"
            ) from exc

    def messages(self) -> list[Any]:
        """Return the chat messages of a system or messages recipe."""
        if self.kind is SourceKind.SYSTEM:
            return [{"role": "system", "content": self.content}]
        return list(self.content)


def read_system(path: str, tools: list[Any] | None, kwargs: dict[str, Any] | None = None) -> Recipe:
    """Read a system prompt. The text is not changed: a final newline counts."""
    content = _read_text("--system", path)
    return Recipe(kind=SourceKind.SYSTEM, content=content, tools=tools, chat_template_kwargs=kwargs)


def read_plain_text(path: str) -> Recipe:
    """Read text for the completions API, which uses no chat template."""
    return Recipe(kind=SourceKind.TEXT, content=_read_text("--text", path))


def read_messages(path: str, tools: list[Any] | None, kwargs: dict[str, Any] | None = None) -> Recipe:
    """Read a list of chat messages, or a whole chat request with its tools and template kwargs."""
    value = _read_json("--messages", path)
    if isinstance(value, dict) and "messages" in value:
        if not tools and value.get("tools"):
            tools = _checked_tools("--messages.tools", value["tools"])
        if kwargs is None and value.get("chat_template_kwargs") is not None:
            kwargs = _require_object("--messages.chat_template_kwargs", value["chat_template_kwargs"])
        value = value["messages"]
    _check_messages("--messages", value, path)
    return Recipe(kind=SourceKind.MESSAGES, content=value, tools=tools, chat_template_kwargs=kwargs)


def _check_messages(field: str, value: Any, path: str = "") -> None:
    messages = _require_list(field, path, value, 'a JSON list like [{"role": "system", "content": "..."}]')
    for index, message in enumerate(messages):
        place = f"{field}[{index}]"
        if not isinstance(message, dict):
            raise InvalidArgumentError(place, message, 'must be an object with "role" and "content"')
        role, content = message.get("role"), message.get("content")
        if role not in KNOWN_ROLES:
            raise InvalidArgumentError(f"{place}.role", role, f"must be one of {', '.join(KNOWN_ROLES)}")
        if not isinstance(content, str | list) and not (role == "assistant" and content is None):
            raise InvalidArgumentError(f"{place}.content", content, "must be text, or a list of content parts")


def read_tools(path: str) -> list[Any]:
    """Read OpenAI tools; vLLM checks their content."""
    return _checked_tools("--tools", _read_json("--tools", path), path)


def _checked_tools(field: str, value: Any, path: str = "") -> list[Any]:
    tools = _require_list(field, path, value, 'a JSON list like [{"type": "function", "function": {...}}]')
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            problem = "must be an object like the OpenAI API's tools"
            raise InvalidArgumentError(f"{field}[{index}]", tool, problem)
    return tools


def parse_template_kwargs(text: str) -> dict[str, Any]:
    """Read chat template kwargs from JSON; the template checks their content."""
    field = "--chat-template-kwargs"
    try:
        return _require_object(field, read_json(text))
    except JsonError as exc:
        raise InvalidArgumentError(field, text, f"{exc}; it must be {_KWARGS_EXAMPLE}") from exc


def read_tokens(path: str) -> list[int]:
    """Read token ids: a JSON list, or an object with `tokens` as vLLM's /tokenize returns."""
    value = _read_json("--tokens", path)
    if isinstance(value, dict) and "tokens" in value:
        value = value["tokens"]
    tokens = _require_list("--tokens", path, value, 'a JSON list of token ids like [1, 3087], or {"tokens": [1, 3087]}')
    for index, token in enumerate(tokens):
        if not is_token(token):
            raise InvalidArgumentError(f"--tokens[{index}]", token, "must be a token id, a whole number from 0")
    return tokens


def _require_list(field: str, path: str, value: Any, example: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else _json_kind(value)
        raise InvalidArgumentError(field, path, f"holds {found}; it must hold {example}")
    return value


def _require_object(field: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidArgumentError(field, value, f"is {_json_kind(value)}; it must be {_KWARGS_EXAMPLE}")
    return value


def _read_json(field: str, path: str) -> Any:
    text = _read_text(field, path)
    try:
        return read_json(text)
    except JsonError as exc:
        raise InvalidArgumentError(field, path, str(exc)) from exc


def _read_text(field: str, path: str) -> str:
    """Read a file or stdin, at most one byte more than a source may have: a device may be endless."""
    try:
        with nullcontext(sys.stdin.buffer) if path == "-" else Path(path).open("rb") as file:
            raw = file.read(MAX_SOURCE_BYTES + 1)
        text = raw.decode("utf-8")
    except OSError as exc:
        raise InvalidArgumentError(field, path, f"cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise InvalidArgumentError(field, path, f"is not UTF-8 text (byte {exc.start}); save it as UTF-8") from exc
    except ValueError as exc:  # a NUL in the path
        raise InvalidArgumentError(field, path, f"cannot be read: {exc}") from exc
    problem = ""
    if len(raw) > MAX_SOURCE_BYTES:
        problem = f"has more than {MAX_SOURCE_BYTES} bytes; no prompt is that long"
    elif text.startswith("\ufeff"):
        problem = "begins with a byte order mark, which requests do not send; save it as UTF-8 without one"
    elif not text.strip():
        problem = "is empty; there is nothing to pin"
    if problem:
        raise InvalidArgumentError(field, path, problem)
    return text


def _json_kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")
