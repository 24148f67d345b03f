"""What a reader returns: where a request marks its prompt, for how long, and what to render to find that place."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvtier.errors import KvtierError

Json = dict[str, Any]
Path = tuple[str | int, ...]

MAX_BREAKPOINTS = 4
"""Per request, in both hosted APIs."""

# A letter and a digit share no first token, in any vocabulary.
PROBES = ("Apricots ripen early.", "7 quokkas nap.")

# Fields that change no token of the prompt. Left out of what is rendered, so that a prompt is rendered once,
# whatever is sampled from it. An unknown field stays: it may change the prompt.
_NOT_RENDERED = frozenset(
    {
        "cache_control", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_salt",
        "kv_transfer_params", "ec_transfer_params", "stream", "stream_options", "store", "background", "metadata",
        "user", "safety_identifier", "service_tier", "request_id", "session_id", "priority", "n", "seed", "logprobs",
        "top_logprobs", "logit_bias", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
        "frequency_penalty", "repetition_penalty", "stop", "stop_sequences", "stop_token_ids", "ignore_eos",
        "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "add_generation_prompt",
        "continue_final_message",
    }
)  # fmt: skip


class Api(StrEnum):
    """An endpoint whose requests may be marked; the value is its path."""

    MESSAGES = "/v1/messages"
    CHAT = "/v1/chat/completions"
    RESPONSES = "/v1/responses"


class MarkerError(KvtierError):
    """A marker that the hosted API refuses.

    Attributes:
        path: The field, as keys and indexes from the top of the body; empty for the body as a whole.
        problem: What is wrong with it, as the hosted API words it.
    """

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{'.'.join(map(str, path))}: {problem}" if path else problem)
        self.path, self.problem = path, problem


@dataclass(frozen=True, kw_only=True)
class Marker:
    """A place up to which the prompt is to be kept.

    Attributes:
        ttl_s: Seconds for which it is kept after its last use.
        variants: Bodies for vLLM's render endpoint. Their prompts agree up to the marker and differ behind it.
    """

    ttl_s: int
    variants: tuple[Json, ...]


@dataclass(frozen=True, kw_only=True)
class MarkedRequest:
    """A request with markers.

    Attributes:
        body: What vLLM gets, without the markers that it does not know.
        markers: In the order of the prompt; at most `MAX_BREAKPOINTS`.
        has_cache_control: It uses Anthropic's marker, so its usage has Anthropic's fields, in the chat API too.
        is_prewarm: The prompt is computed and nothing is answered.
    """

    api: Api
    body: Json
    markers: tuple[Marker, ...]
    has_cache_control: bool = False
    is_prewarm: bool = False


def render_body(api: Api, body: Json, **changes: Any) -> Json:
    """Return a body for vLLM's render endpoint: of what decides the prompt, with `changes`."""
    rendered = {name: value for name, value in body.items() if name not in _NOT_RENDERED} | changes
    choice = rendered.pop("tool_choice", None)
    # A forced tool may not be among those before the marker. "none" may take the tools out of the prompt.
    if choice == "none" or (isinstance(choice, Mapping) and choice.get("type") == "none"):
        rendered["tool_choice"] = choice
    if api is Api.MESSAGES:
        rendered["max_tokens"] = 1
        thinking = rendered.get("thinking")
        if isinstance(thinking, Mapping) and thinking.get("type") == "enabled":
            del rendered["thinking"]  # its budget must be below max_tokens, and it is not in the prompt
    # No image is sent back: its placeholder tokens are what counts.
    return rendered | {"mm_payload": "none"}


def as_dicts(value: Any) -> Sequence[Any]:
    """Return a list of the body, empty where it is no list: what is malformed is vLLM's to refuse."""
    return value if isinstance(value, list) else ()
