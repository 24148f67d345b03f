"""What a file of prompts may say: the model that checks it, and the JSON Schema that is published of it."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from kvtier.core import limits
from kvtier.core.ttl import seconds_of
from kvtier.errors import InvalidArgumentError

SCHEMA_ID = "urn:kvtier:prompts:v1"
SOURCES = ("system", "system_file", "messages", "messages_file", "text", "text_file", "tokens", "tokens_file")
"""Fields of which each prompt has one."""
DEFAULT_SET = "default"


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
Labels = Annotated[
    Mapping[StrictStr, StrictStr],
    _bounded(limits.check_labels, "labels"),
    _bounded(limits.check_users_labels, "labels"),
]
Duration = Annotated[StrictStr, AfterValidator(_duration), Field(examples=["12h", "7d", "never"])]
Priority = Annotated[StrictInt, Field(ge=limits.PRIORITY.least, le=limits.PRIORITY.most)]
Text = Annotated[StrictStr, _bounded(limits.TEXT.check, "")]
Path = Annotated[StrictStr, Field(min_length=1)]


Objects = list[Mapping[StrictStr, Any]]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PromptHow(_Model):
    """How prompts are pinned, and for which model. What is left out has its default, also if the pin has another."""

    model: Annotated[Text, Field(description="Served model or LoRA adapter; default: the first that vLLM serves")] = ""
    cache_salt: Annotated[Text, Field(description="cache_salt as requests send it")] = ""
    ttl: Annotated[Duration, Field(description="Time until the pin ends: 12h, 7d, never")] = "never"
    sliding: Annotated[StrictBool, Field(description="The time to live begins again with each use")] = False
    priority: Annotated[Priority, Field(description="Which come back first, and stay longest in vLLM's cache")] = 0
    public: Annotated[StrictBool, Field(description="Restore it for requests with any cache_salt")] = False
    owner: Annotated[Owner, Field(description="Whose they are; the daemon may limit what an owner has pinned")] = ""
    labels: Annotated[Labels, Field(description="What commands select prompts by: -l key=value")] = {}


class PromptEntry(PromptHow):
    """One prompt: a name, exactly one source, and how it is pinned."""

    name: Annotated[StrictStr, _bounded(_check_name)] = Field(
        description="Its name", json_schema_extra={"pattern": f"^{limits.NAME.pattern}$"}
    )
    system: Annotated[StrictStr | None, Field(description="System prompt, exactly as requests send it")] = None
    system_file: Annotated[Path | None, Field(description="File with the system prompt; relative to this file")] = None
    messages: Annotated[Objects | None, Field(description="Chat messages as in the OpenAI API")] = None
    messages_file: Annotated[
        Path | None, Field(description="JSON file with chat messages, or a whole chat request")
    ] = None
    text: Annotated[StrictStr | None, Field(description="Text for the completions API")] = None
    text_file: Annotated[Path | None, Field(description="File with text for the completions API")] = None
    tokens: Annotated[list[StrictInt] | None, Field(description="Token ids")] = None
    tokens_file: Annotated[Path | None, Field(description="JSON file with token ids")] = None
    tools: Annotated[Objects | None, Field(description="OpenAI tools")] = None
    tools_file: Annotated[Path | None, Field(description="JSON file with OpenAI tools")] = None
    chat_template_kwargs: Annotated[Mapping[StrictStr, Any] | None, Field(description="As requests send them")] = None


class PromptsFile(_Model):
    """A file of prompts for `kvtier apply`."""

    set: Annotated[
        StrictStr,
        Field(
            pattern=f"^{limits.LABEL_VALUE.pattern}$",
            description="Set that these prompts belong to: --prune ends pins of the same set only. Empty: of none",
        ),
    ] = DEFAULT_SET
    defaults: Annotated[PromptHow, Field(description="For each prompt of this file that does not say otherwise")] = (
        PromptHow()
    )
    prompts: list[Any] = Field(description="The prompts; the order does not matter")


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a file, for editors and for checks in CI."""
    schema, entry = PromptsFile.model_json_schema(), PromptEntry.model_json_schema()
    definitions = schema.setdefault("$defs", {}) | entry.pop("$defs", {})
    schema["$defs"] = definitions | {"PromptEntry": entry | {"oneOf": [{"required": [name]} for name in SOURCES]}}
    schema["properties"]["prompts"]["items"] = {"$ref": "#/$defs/PromptEntry"}
    header = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_ID}
    plain: dict[str, Any] = _plain(schema)
    return header | plain


def _plain(value: Any) -> Any:
    """Return a schema without what is of use to pydantic only: titles, and defaults that stand for nothing."""
    if isinstance(value, dict):
        drop = {"title"} | ({"default"} if value.get("default", ...) is None else set())
        return {key: _plain(item) for key, item in value.items() if key not in drop or isinstance(item, dict)}
    return [_plain(item) for item in value] if isinstance(value, list) else value
