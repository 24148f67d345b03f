"""Renders conversations to tokens as vLLM's API server does: with the model's own tokenizer and chat template.

Source: `vllm.renderers` and `vllm.tokenizers` of vLLM 0.32. Nothing here is asked on behalf of a request.
"""

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.errors import KvtierError

if TYPE_CHECKING:
    from vllm.config import ModelConfig

MAX_RENDERED_CHARS = 200_000
"""Of a conversation of a few words with one tool. Those of known templates stay below 10,000."""
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look a word up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
        },
    }
]

Message = dict[str, str]


class NoUserTurnError(KvtierError):
    """Where the first user turn begins cannot be found; the text says why."""


class ChatRenderer:
    """The model's tokenizer, with its chat template. One thread at a time.

    Args:
        tokenizer: As vLLM loads it.
        templates: The chat template without and with tools; empty for a tokenizer of vLLM's that has a format of its
            own, in code.

    Attributes:
        special_tokens: Those that stand for no text of a user.
        template: The text of the template; empty when there is none.
    """

    def __init__(self, tokenizer: Any, templates: tuple[str, str] | None) -> None:
        self._tokenizer, self._templates = tokenizer, templates
        self.template = templates[0] if templates is not None else ""
        self.special_tokens = _special_tokens(tokenizer)

    def render(self, messages: Sequence[Message], *, with_tools: bool = False) -> list[int]:
        """Return the tokens of a conversation, up to where the model goes on.

        Raises:
            Exception: Whatever the template raises.
            NoUserTurnError: It renders no text, or too much.
        """
        tools = TOOLS if with_tools else None
        if self._templates is None:
            rendered = self._tokenizer.apply_chat_template(list(messages), tools=tools, add_generation_prompt=True)
            return [int(token) for token in rendered]
        shown = [_as_parts(message) for message in messages] if self._takes_parts else list(messages)
        text = self._text(shown, with_tools=with_tools)
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones too."""
        text = str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))
        if self._templates is None:  # with special tokens, Mistral's shows SentencePiece's blanks and bytes
            text = text.replace("\u2581", " ").replace("<0x0A>", "\n")
        return text

    @functools.cached_property
    def _takes_parts(self) -> bool:
        """Whether the template takes a message as a list of parts only: it does not show one that is text."""
        try:
            return "Hello" not in self._text([{"role": "user", "content": "Hello"}], with_tools=False)
        except TimeoutError:
            raise
        except Exception:  # the next rendering raises again where that is not the reason
            return True

    def _text(self, messages: Sequence[Mapping[str, Any]], *, with_tools: bool) -> str:
        assert self._templates is not None
        text = self._tokenizer.apply_chat_template(
            messages,
            tools=TOOLS if with_tools else None,
            chat_template=self._templates[with_tools],
            tokenize=False,
            add_generation_prompt=True,
        )
        if not isinstance(text, str):
            raise NoUserTurnError(f"the chat template renders a {type(text).__name__}, not text")
        if len(text) > MAX_RENDERED_CHARS:
            raise NoUserTurnError(f"the chat template renders {len(text)} characters for a few words")
        return text


def _as_parts(message: Message) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def load_chat_renderer(model_config: "ModelConfig", template_path: Path | None) -> ChatRenderer:
    """Load the tokenizer and find the chat template that vLLM's API server uses.

    Args:
        model_config: vLLM's.
        template_path: The file that vLLM got by `--chat-template`, which the engine is not given; None: it got none.

    Raises:
        Exception: The tokenizer or the file cannot be read.
        NoUserTurnError: There is no tokenizer, or no chat template.
    """
    from vllm.tokenizers import cached_tokenizer_from_config

    tokenizer: Any = cached_tokenizer_from_config(model_config)
    if tokenizer is None:
        raise NoUserTurnError("vLLM has no tokenizer (--skip-tokenizer-init)")
    if template_path is not None:
        text = template_path.read_text()
        return ChatRenderer(tokenizer, (text, text))
    if _has_format_in_code(tokenizer):
        return ChatRenderer(tokenizer, None)
    plain = _template_of(tokenizer, None) or _template_from_elsewhere(tokenizer, model_config)
    if plain is None:
        raise NoUserTurnError("the model has no chat template")
    return ChatRenderer(tokenizer, (plain, _template_of(tokenizer, TOOLS) or plain))


def _has_format_in_code(tokenizer: Any) -> bool:
    """Return whether the tokenizer is one of vLLM's own that needs no template (Mistral, DeepSeek V3.2)."""
    module = type(tokenizer).apply_chat_template.__module__
    return bool(module.startswith("vllm.tokenizers.") and module != "vllm.tokenizers.hf")


def _template_of(tokenizer: Any, tools: list[dict[str, Any]] | None) -> str | None:
    """Return the tokenizer's template; a model may have another one for tools."""
    try:
        template = tokenizer.get_chat_template(None, tools=tools)
    except Exception:  # it raises ValueError where there is none, tokenizers with code of their own raise anything
        return None
    return template if isinstance(template, str) else None


def _template_from_elsewhere(tokenizer: Any, model_config: "ModelConfig") -> str | None:
    """Return the template of the model's processor, or vLLM's own for it."""
    from vllm.renderers.hf import resolve_chat_template

    template = resolve_chat_template(tokenizer, None, None, model_config=model_config)
    return template if isinstance(template, str) else None


def _special_tokens(tokenizer: Any) -> frozenset[int]:
    special = set(tokenizer.all_special_ids)
    with contextlib.suppress(Exception):  # not every tokenizer knows those that were added to its vocabulary
        special |= set(tokenizer.get_added_vocab().values())
    return frozenset(special)


@contextlib.contextmanager
def interrupted_after(timeout_s: float) -> Iterator[None]:
    """Raise TimeoutError in this thread if its Python code still runs after `timeout_s`.

    Jinja's sandbox bounds a loop, but not loops in loops. Nothing else ends a thread in Python code: a deadline is not
    looked at within a template, and a trace function would slow every thread from Python 3.12 on.
    """
    thread_id = ctypes.c_ulong(threading.get_ident())
    lock, is_over = threading.Lock(), False

    def interrupt() -> None:
        with lock:
            if not is_over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread_id, ctypes.py_object(TimeoutError))

    timer = threading.Timer(timeout_s, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        # One that is pending is raised in the loop. To take it back (NULL in its place) would leave CPython's flag set:
        # 3.11 then never gets past the next line under a debugger, 3.12 is slower for good.
        with contextlib.suppress(TimeoutError):
            with lock:
                is_over = True
            for _ in range(100):
                pass
        timer.cancel()
