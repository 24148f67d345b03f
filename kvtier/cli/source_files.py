"""Reads what the command line pins from files, so that a mistake names option, file and remedy."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from kvtier.errors import InvalidArgumentError
from kvtier.json_text import JsonError, read_json
from kvtier.library.rendering.recipe import (
    KWARGS_EXAMPLE,
    Recipe,
    SourceKind,
    check_messages,
    check_tokens,
    check_tools,
    require_object,
    text_problem,
)

MAX_SOURCE_BYTES = 256 * 1024**2


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
            tools = check_tools("--messages.tools", value["tools"], path)
        if kwargs is None and value.get("chat_template_kwargs") is not None:
            kwargs = require_object("--messages.chat_template_kwargs", value["chat_template_kwargs"])
        value = value["messages"]
    check_messages("--messages", value, path)
    return Recipe(kind=SourceKind.MESSAGES, content=value, tools=tools, chat_template_kwargs=kwargs)


def read_tools(path: str) -> list[Any]:
    """Read OpenAI tools; vLLM checks their content."""
    return check_tools("--tools", _read_json("--tools", path), path)


def parse_template_kwargs(text: str) -> dict[str, Any]:
    """Read chat template kwargs from JSON; the template checks their content."""
    field = "--chat-template-kwargs"
    try:
        return require_object(field, read_json(text))
    except JsonError as exc:
        raise InvalidArgumentError(field, text, f"{exc}; it must be {KWARGS_EXAMPLE}") from exc


def read_tokens(path: str) -> list[int]:
    """Read token ids: a JSON list, or an object with `tokens` as vLLM's /tokenize returns."""
    value = _read_json("--tokens", path)
    if isinstance(value, dict) and "tokens" in value:
        value = value["tokens"]
    return check_tokens("--tokens", value, path)


def read_request(path: str) -> dict[str, Any]:
    """Read a chat or completions request, as it is sent to vLLM."""
    value = _read_json("FILE", path)
    if not isinstance(value, dict):
        raise InvalidArgumentError("FILE", path, 'holds no request; it must be an object with "messages" or "prompt"')
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
    problem = text_problem(text)
    if len(raw) > MAX_SOURCE_BYTES:
        problem = f"has more than {MAX_SOURCE_BYTES} bytes; no prompt is that long"
    if problem:
        raise InvalidArgumentError(field, path, problem)
    return text
