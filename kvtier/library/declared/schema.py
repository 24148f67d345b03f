"""What a file of prompts may say: the model that checks it, and the JSON Schema that is published of it."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from kvtier.core import limits
from kvtier.core.ttl import seconds_of
from kvtier.errors import InvalidArgumentError

SCHEMA_ID = "https://kvtier.dev/schemas/prompts-v1.json"
SOURCES = ("system", "system_file", "messages", "messages_file", "text", "text_file", "tokens", "tokens_file")
"""Fields of which each prompt has one."""
DEFAULT_SET = "default"
SET_LABEL = "kvtier/set"
"""Label of what was applied: the name of the set."""


def _bounded(check: Any, *args: Any) -> AfterValidator:
    """Return a validator by a check of `limits`, whose message pydantic then carries."""

    def validate(value: Any) -> Any:
        try:
            check(*args, value)
        except InvalidArgumentError as exc:
            raise ValueError(exc.remedy) from exc
        return value

    return AfterValidator(validate)


def _duration(text: str) -> str:
    seconds_of(text)
    return text


def _check_name(value: str) -> None:
    limits.check_name(value)
    limits.check_chosen_name("name", value)


Owner = Annotated[StrictStr, _bounded(limits.check_operators_owner, "owner")]
Labels = Annotated[Mapping[StrictStr, StrictStr], _bounded(limits.check_labels, "labels")]
Duration = Annotated[StrictStr, AfterValidator(_duration), Field(examples=["12h", "7d", "never"])]
Priority = Annotated[StrictInt, Field(ge=limits.PRIORITY.least, le=limits.PRIORITY.most)]
Text = Annotated[StrictStr, _bounded(limits.TEXT.check, "")]
Path = Annotated[StrictStr, Field(min_length=1)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PromptHow(_Model):
    """How prompts are pinned, and for which model. What is left out has its default, also if the pin has another."""

    model: Text = Field("", description="Served model or LoRA adapter; default: the first that vLLM serves")
    cache_salt: Text = Field("", description="cache_salt as requests send it")
    ttl: Duration = Field("never", description="Time until the pin ends: 12h, 7d, never")
    sliding: StrictBool = Field(False, description="The time to live begins again with each use")
    priority: Priority = Field(0, description="Which prompts come back first, and stay longest in vLLM's cache")
    public: StrictBool = Field(False, description="Restore it for requests with any cache_salt")
    owner: Owner = Field("", description="Whose prompts they are; the daemon may limit what an owner has pinned")
    labels: Labels = Field({}, description="What commands select prompts by: -l key=value")


class PromptEntry(PromptHow):
    """One prompt: a name, exactly one source, and how it is pinned."""

    name: Annotated[StrictStr, _bounded(_check_name)] = Field(
        description="Its name", json_schema_extra={"pattern": f"^{limits.NAME.pattern}$"}
    )
    system: StrictStr | None = Field(None, description="System prompt, exactly as requests send it")
    system_file: Path | None = Field(None, description="File with the system prompt; relative to this file")
    messages: Sequence[Mapping[StrictStr, Any]] | None = Field(None, description="Chat messages as in the OpenAI API")
    messages_file: Path | None = Field(None, description="JSON file with chat messages, or with a whole chat request")
    text: StrictStr | None = Field(None, description="Text for the completions API")
    text_file: Path | None = Field(None, description="File with text for the completions API")
    tokens: Sequence[StrictInt] | None = Field(None, description="Token ids")
    tokens_file: Path | None = Field(None, description="JSON file with token ids")
    tools: Sequence[Mapping[StrictStr, Any]] | None = Field(None, description="OpenAI tools")
    tools_file: Path | None = Field(None, description="JSON file with OpenAI tools")
    chat_template_kwargs: Mapping[StrictStr, Any] | None = Field(None, description="As requests send them")


class PromptsFile(_Model):
    """A file of prompts for `kvtier apply`."""

    set: Annotated[StrictStr, Field(pattern=f"^{limits.LABEL_VALUE.pattern}$", min_length=1)] = Field(
        DEFAULT_SET, description="Name of the set that these prompts belong to: --prune ends pins of the same set only"
    )
    defaults: PromptHow = Field(PromptHow(), description="For each prompt of this file that does not say otherwise")
    prompts: Sequence[PromptEntry] = Field(description="The prompts; the order does not matter")


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a file, for editors and for checks in CI."""
    schema = PromptsFile.model_json_schema()
    one_source = [{"required": [name]} for name in SOURCES]
    schema["$defs"]["PromptEntry"]["oneOf"] = one_source
    header = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_ID}
    return header | _plain(schema)


def _plain(value: Any) -> Any:
    """Return a schema without what is of use to pydantic only: titles, and defaults that stand for nothing."""
    if isinstance(value, dict):
        drop = {"title"} | ({"default"} if value.get("default", ...) is None else set())
        return {key: _plain(item) for key, item in value.items() if key not in drop or isinstance(item, dict)}
    return [_plain(item) for item in value] if isinstance(value, list) else value


