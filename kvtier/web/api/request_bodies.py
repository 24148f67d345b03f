"""What clients send, checked by type; what values may be, the library and the daemon check."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, ValidationError
from starlette.requests import Request

from kvtier.errors import InvalidArgumentError
from kvtier.json_text import JsonError, read_json
from kvtier.web.api.daemon_calls import DaemonCalls

MAX_LISTS = 200_000
"""Lists and objects of one body. Python's collector walks all of them at once, and engines wait meanwhile."""

M = TypeVar("M", bound="Body")

Tokens = SkipValidation[list[int]]
Objects = SkipValidation[list[dict[str, Any]]]
"""Checked by the library, in slices; pydantic would hold the interpreter."""


class Body(BaseModel):
    """A JSON object; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class PinBody(Body):
    """What to pin, and how. Give one source: system, messages, text or tokens; none: the stored one, rendered again."""

    system: str | None = None
    messages: Objects | None = None
    text: str | None = None
    tokens: Tokens | None = None
    tools: Objects | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    model: str = ""
    cache_salt: str = ""
    ttl_s: int | None = None
    priority: int | None = None
    public: bool | None = None
    sliding: bool | None = None
    owner: str | None = None
    labels: dict[str, str] | None = None
    replace: bool = Field(False, description="Replace another prompt of that name, once this one is durable.")
    warm: bool = Field(True, description="Have vLLM compute it, and answer when it is durable.")
    timeout_s: float = Field(600.0, ge=1, le=3600, description="For that, in seconds.")


class SetBody(Body):
    """How a prompt is pinned; what is left out stays as it is. A label whose value is null is removed."""

    ttl_s: int | None = None
    priority: int | None = None
    public: bool | None = None
    sliding: bool | None = None
    owner: str | None = None
    labels: dict[str, str | None] | None = None


class EvictBody(Body):
    """What to drop."""

    tier: Literal["host", "disk"] | None = Field(None, description="Only from this tier.")
    force: bool = Field(False, description="Though it is pinned; the pin stays.")


class EvictAllBody(EvictBody):
    """What to drop, of one namespace or of all."""

    namespace_id: str | None = Field(
        None, description="Its chunks only; its id, or the beginning of it. No prompt is forgotten."
    )


class RenameBody(Body):
    """The new name."""

    new_name: str


class RollbackBody(Body):
    """Which version; none: the one before."""

    version: int | None = None


class AdoptBody(Body):
    """The automatic pin that gets the name of the path."""

    automatic: str
    ttl_s: int | None = None
    priority: int | None = None
    public: bool | None = None
    replace: bool = False


class VerifyBody(Body):
    """Whether vLLM is asked too, beside the checksums."""

    live: bool = True
    timeout_s: float = Field(600.0, ge=1, le=3600, description="For one answer of vLLM, in seconds.")


class QuarantineBody(Body):
    """Why."""

    reason: str


class ExplainBody(Body):
    """A request as it is sent to vLLM, or the tokens of one."""

    request: SkipValidation[dict[str, Any]] | None = None
    tokens: Tokens | None = None
    model: str = ""
    lora_name: str = ""
    cache_salt: str = ""


class FsckBody(Body):
    """What a check does."""

    repair: bool = False
    deep: bool = False


def described(kind: type[Body], *, is_required: bool = True) -> dict[str, Any]:
    """Return the argument of a route that describes its body."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    body = {"required": is_required, "content": {"application/json": {"schema": schema}}}
    return {"openapi_extra": {"requestBody": body}}


async def body_of(daemon: DaemonCalls, request: Request, kind: type[M]) -> Callable[[], M]:
    """Receive a body; what is returned reads it, in a thread: long JSON takes a while.

    That raises InvalidArgumentError: field, value (unless it may be text of a prompt) and remedy.

    Raises:
        TooManyCallsError: As many bodies come as may.
    """
    raw = await daemon.receive_body(request)
    return lambda: _parsed(raw, kind)


def _parsed(raw: bytes, kind: type[M]) -> M:
    if raw.count(b"[") + raw.count(b"{") > MAX_LISTS:
        raise InvalidArgumentError("body", f"{len(raw)} bytes", f"has more than {MAX_LISTS} lists and objects")
    try:
        return kind.model_validate(read_json(raw, in_turns=True) if raw else {})
    except JsonError as exc:
        raise InvalidArgumentError("body", f"{len(raw)} bytes", str(exc)) from exc
    except ValidationError as exc:
        error = exc.errors(include_url=False)[0]
        field = ".".join(map(str, error["loc"])) or "body"
        shown = error["input"] if isinstance(error["input"], bool | int | float) else "..."
        known = f"; known: {', '.join(kind.model_fields)}" if error["type"] == "extra_forbidden" else ""
        raise InvalidArgumentError(field, shown, error["msg"] + known) from exc
