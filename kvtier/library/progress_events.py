"""What long methods report meanwhile to `on_progress`: one event for each step, in the order in which they happen.

The callback runs in the thread of the method, which waits for it; what it raises ends the method.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from kvtier.library.rendering.vllm_client import VllmUnreachableError
from kvtier.library.values.public_values import Prompt


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """vLLM has turned the source into tokens.

    Attributes:
        name: Of the prompt.
        model: The served model that did.
        url: Of the vLLM, without secrets.
        warnings: Why requests may begin with other tokens.
    """

    name: str
    num_tokens: int
    model: str
    url: str
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class NotRendered:
    """No vLLM answers: the source, or the token ids, are registered without it."""

    problem: VllmUnreachableError


@dataclass(frozen=True, kw_only=True)
class Registered:
    """The pin is durable in the daemon's ledger. Its prompt has another name if it is the version of a replacement."""

    name: str
    prompt: Prompt


@dataclass(frozen=True, kw_only=True)
class Confirmed:
    """Engines have recognized the prompt: `prompt.num_confirmed` of `prompt.num_engines`."""

    prompt: Prompt


@dataclass(frozen=True, kw_only=True)
class Capturing:
    """vLLM computes, the daemon stores: sent at the beginning, and whenever the status changes."""

    prompt: Prompt


class CaptureOutcome(Enum):
    """How capturing ended."""

    DURABLE = auto()
    OVER_QUOTA = auto()
    INCOMPLETE = auto()
    """vLLM has not offered all chunks; they are captured when it next computes them."""
    TIMED_OUT = auto()


@dataclass(frozen=True, kw_only=True)
class Captured:
    """Capturing has ended."""

    prompt: Prompt
    outcome: CaptureOutcome


@dataclass(frozen=True, kw_only=True)
class ReplacementDropped:
    """A version that waited to replace a prompt has ended; the prompt serves as before."""

    name: str
    version: str


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """A version has taken the name of the prompt that it replaces.

    Attributes:
        previous: Name of the version before.
    """

    name: str
    previous: str


class WarmResult(StrEnum):
    """What happened to one prompt."""

    WARMED = "warmed"
    DUPLICATE = "same prompt"
    REFUSED = "refused"
    OVER_LIMIT = "over limit"
    BUSY = "vLLM busy"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Warmed:
    """What happened to one prompt.

    Attributes:
        why: Why it was not warmed.
        cached_tokens: Tokens that vLLM did not compute; None when vLLM does not report them.
        seconds: Duration of the request.
    """

    name: str
    num_tokens: int
    result: WarmResult
    why: str = ""
    cached_tokens: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Warming:
    """These prompts are warmed next, in this order.

    Attributes:
        limit_tokens: Of vLLM's prefix cache; None: no limit, or vLLM does not report its size.
    """

    prompts: tuple[Prompt, ...]
    limit_tokens: int | None


@dataclass(frozen=True, kw_only=True)
class Transferred:
    """Bytes of a bundle that were sent or received since the last event."""

    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Applied:
    """The daemon has what files of prompts say: this many prompts differed."""

    num_changed: int


@dataclass(frozen=True, kw_only=True)
class EmptyFile:
    """A file of prompts declares none, and no set."""

    path: str


@dataclass(frozen=True, kw_only=True)
class ModelNotServed:
    """vLLM does not serve a model that files name: this many prompts wait for one that does.

    Attributes:
        url: Of the vLLM, without secrets.
    """

    model: str
    num_prompts: int
    url: str


@dataclass(frozen=True, kw_only=True)
class EngineNotAttached:
    """vLLM serves the model, and no engine of it is attached to the daemon: this many prompts are not computed."""

    model: str
    num_prompts: int


Progress = (
    Applied
    | EmptyFile
    | ModelNotServed
    | EngineNotAttached
    | Rendered
    | NotRendered
    | Registered
    | Confirmed
    | Capturing
    | Captured
    | Replaced
    | ReplacementDropped
    | Warming
    | Warmed
    | Transferred
)
OnProgress = Callable[[Progress], None]


def ignore(_: Progress) -> None:
    """Report to no one."""
