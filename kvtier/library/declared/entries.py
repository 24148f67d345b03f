"""Checks one prompt of a file, with all that it refers to: every mistake of it is found in one go."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kvtier.core import limits
from kvtier.core.ttl import seconds_of
from kvtier.errors import InvalidArgumentError, RenderError
from kvtier.json_text import JsonError, read_json
from kvtier.library.declared.documents import DeclaredError, Document, Place
from kvtier.library.declared.file_schema import SOURCES, PromptEntry, PromptHow, PromptsFile
from kvtier.library.declared.read_text import read_text
from kvtier.library.rendering.recipe import Recipe, check_messages, check_tools, recipe_of

M = TypeVar("M", bound=BaseModel)
_HOW = tuple(PromptHow.model_fields)
_PART = re.compile(r"\[(\d+)\]|([^.\[\]]+)")


@dataclass(frozen=True, kw_only=True)
class DeclaredPrompt:
    """One prompt as a file wants it.

    Attributes:
        recipe: Its source.
        tokens: Token ids, for a source of that kind.
        model: Served model or LoRA adapter; empty: the first that vLLM serves.
        labels: With that of its set.
        source: File, with line and column (from 1): where it says so.
    """

    name: str
    recipe: Recipe = field(repr=False)
    tokens: tuple[int, ...] = field(default=(), repr=False)
    model: str = ""
    cache_salt: str = field(default="", repr=False)
    ttl_s: int = 0
    sliding: bool = False
    priority: int = 0
    public: bool = False
    owner: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    line: int = 0
    column: int = 0

    @property
    def set_name(self) -> str:
        """Name of its set."""
        return self.labels.get(limits.SET_LABEL, "")

    def error(self, value: object, problem: str) -> DeclaredError:
        """Return an error of this prompt that is found later: by vLLM, by what is pinned."""
        return DeclaredError(self.source, self.line, self.column, self.name, value, problem)


class FileCheck:
    """The check of what a document says beside its prompts.

    Attributes:
        errors: All that is wrong with it.
        file: What is right of it, without prompts.
        wrong: Keys of `defaults` that are not in `file`, because they are wrong.
    """

    def __init__(self, document: Document) -> None:
        file, found = _validated(PromptsFile, document.value)
        self.errors = [_schema_error(PromptsFile, document, error["loc"], error) for error in found]
        in_defaults = [error["loc"][1:] for error in found if error["loc"][:1] == ("defaults",)]
        self.wrong = {str(place[0]) for place in in_defaults if place}
        if file is None and isinstance(document.value, Mapping):
            wrong = {str(error["loc"][0]) for error in found if error["loc"]} - ({"defaults"} if self.wrong else set())
            rest = {key: value for key, value in document.value.items() if key not in {*wrong, "prompts"}}
            if self.wrong:
                rest["defaults"] = {key: each for key, each in rest["defaults"].items() if key not in self.wrong}
            file = PromptsFile.model_validate(rest | {"prompts": []})
        self.file = file or PromptsFile(prompts=[])


def entries_of(document: Document) -> list[Any]:
    """Return the prompts of a document, as far as it has a list of them."""
    entries = document.value.get("prompts") if isinstance(document.value, dict) else None
    return entries if isinstance(entries, list) else []


class EntryCheck:
    """The check of one prompt.

    Attributes:
        errors: All that is wrong with it.
        name: Empty: it has none that can be.
        prompt: None: something is wrong.
    """

    def __init__(self, document: Document, said: FileCheck, index: int, value: Any, base: Path | None) -> None:
        """Check.

        Args:
            said: What the document says beside.
            value: The prompt, as YAML has it.
            base: The folder that paths are relative to; None: no path is followed.
        """
        self._document, self._where, self._base = document, ("prompts", index), base
        self._file = said.file
        self.prompt: DeclaredPrompt | None = None
        entry, found = _validated(PromptEntry, value)
        self.errors = [_schema_error(PromptEntry, document, (*self._where, *each["loc"]), each) for each in found]
        # What is wrong is not looked at again, and the rest is.
        wrong = {str(error["loc"][0]) for error in found if error["loc"]}
        if entry is None:
            entry = _without(value, wrong)
        self.name = "" if entry is None or "name" in wrong else entry.name
        if entry is None:
            return
        own = entry.model_fields_set
        self._how = {name: getattr(entry if name in own else said.file.defaults, name) for name in _HOW}
        self._given = [name for name in SOURCES if value.get(name) is not None]
        self._check_together(entry, wrong, wrong | (said.wrong - entry.model_fields_set))
        is_readable = len(self._given) == 1 and not wrong.intersection((*self._given, "tools", "tools_file"))
        source = self._source(entry, self._given[0]) if is_readable else None
        if source is not None and not self.errors:
            self.prompt = self._made(entry, *source)

    @property
    def place(self) -> str:
        """Where it is: `file:line:column`."""
        return ":".join(map(str, self._document.mark(self._where)))

    def _say(self, place: Sequence[str | int], problem: str) -> None:
        self.errors.append(self._document.error((*self._where, *place), problem))

    def _labels(self, entry: PromptEntry) -> dict[str, str]:
        own = {limits.SET_LABEL: self._file.set} if self._file.set else {}
        return {**self._file.defaults.labels, **entry.labels, **own}

    def _check_together(self, entry: PromptEntry, wrong: set[str], unknown: set[str]) -> None:
        """Check what fields must be to each other, as far as each is right by itself.

        Args:
            wrong: Keys of the prompt.
            unknown: Fields whose value is not known, because that, or the file's default, is wrong.
        """
        how = self._how
        is_mistyped = not self._given and not wrong <= set(PromptEntry.model_fields)  # `sytem`: that was said
        if len(self._given) != 1 and not is_mistyped:
            found = f"has {' and '.join(self._given)}" if self._given else "has none"
            self._say(("name",), f"{found}; give one of {', '.join(SOURCES)}")
        if entry.tools is not None and entry.tools_file is not None:
            self._say(("tools_file",), "cannot go with tools; give one of them")
        if how["public"] and how["cache_salt"] and not unknown & {"public", "cache_salt"}:
            self._say(("public",), "a public prompt has no cache_salt; leave one out")
        if how["sliding"] and not seconds_of(how["ttl"]) and not unknown & {"sliding", "ttl"}:
            self._say(("sliding",), "needs a ttl: the time from each use to the end")
        if len(labels := self._labels(entry)) > limits.NUM_LABELS.most:
            most = limits.NUM_LABELS.most
            self._say(("labels",), f"has {len(labels)} labels with that of its set; at most {most} are supported")

    def _made(self, entry: PromptEntry, recipe: Recipe, tokens: tuple[int, ...]) -> DeclaredPrompt:
        how = self._how
        source, line, column = self._document.mark(self._where)
        return DeclaredPrompt(
            name=entry.name,
            recipe=recipe,
            tokens=tokens,
            model=how["model"],
            cache_salt=how["cache_salt"],
            ttl_s=seconds_of(how["ttl"]),
            sliding=how["sliding"],
            priority=how["priority"],
            public=how["public"],
            owner=how["owner"],
            labels=self._labels(entry),
            source=source,
            line=line,
            column=column,
        )

    def _source(self, entry: PromptEntry, given: str) -> tuple[Recipe, tuple[int, ...]] | None:
        """Return recipe and tokens; None: what is wrong is in `errors`."""
        values, num_errors = self._values(entry, given), len(self.errors)
        if values is None:
            return None
        try:
            made = recipe_of(**values)
        except InvalidArgumentError as exc:
            others = [each for each in _item_errors(values) if each.field != exc.field]
            for error in (exc, *others):
                self._say_of_source(error, given)
            return None
        except RenderError as exc:
            self._say((), str(exc))
            return None
        if made is None:
            self._say((given,), "is empty; there is nothing to pin")
        elif problem := _too_long(*made):
            self._say((given,), problem)
        return made if len(self.errors) == num_errors else None

    def _values(self, entry: PromptEntry, given: str) -> dict[str, Any] | None:
        """Return the arguments of `recipe_of`, with what files hold; None: one of these cannot be used."""
        values: dict[str, Any] = {"chat_template_kwargs": _plain(entry.chat_template_kwargs)}
        num_errors = len(self.errors)
        for name in (given, *(each for each in ("tools", "tools_file") if getattr(entry, each) is not None)):
            value = _plain(getattr(entry, name))
            field_name = name.removesuffix("_file")
            try:
                values[field_name] = value if name == field_name else self._content(field_name, value)
            except ValueError as exc:
                self._say((name,), str(exc))
        messages = values.get("messages")
        if isinstance(messages, dict) and "messages" in messages:  # a whole chat request
            for name in ("tools", "chat_template_kwargs"):
                values[name] = values.get(name) or messages.get(name)
            values["messages"] = messages["messages"]
        if isinstance(values.get("tokens"), dict):
            values["tokens"] = values["tokens"].get("tokens")
        return values if len(self.errors) == num_errors else None

    def _content(self, field_name: str, name: str) -> Any:
        """Return what a file holds. ValueError: it cannot be read, or is no JSON."""
        if self._base is None:
            raise ValueError(f"names a file, which no text may; put the content itself under {field_name}")
        path = str(self._base / name)
        text = read_text(path)
        if field_name in ("system", "text"):
            return text
        try:
            return read_json(text)
        except JsonError as exc:
            raise ValueError(f"{path}:{exc.line}:{exc.column}: {exc}" if exc.line else str(exc)) from exc

    def _say_of_source(self, exc: InvalidArgumentError, given: str) -> None:
        parts = tuple(int(number) if number else key for number, key in _PART.findall(exc.field))
        if given.endswith("_file") and parts[:1] == (given.removesuffix("_file"),):
            self._say((given,), f"{exc.field}: {exc.remedy}")
        else:
            self._say(parts, exc.remedy)


def _too_long(recipe: Recipe, tokens: Sequence[int]) -> str:
    """Return why no daemon takes a source, however good it is; empty: one does."""
    try:
        recipe.to_json()
        limits.check_count("tokens", len(tokens), limits.MAX_TOKENS)
    except InvalidArgumentError as exc:
        return f"has {exc.value}; {exc.remedy}"
    return ""


def _item_errors(values: Mapping[str, Any]) -> Iterator[InvalidArgumentError]:
    """Yield what is wrong with each message and each tool."""
    for name, check in (("messages", check_messages), ("tools", check_tools)):
        items = values.get(name)
        for index, item in enumerate(items) if isinstance(items, list) else ():
            try:
                check(name, [item])
            except InvalidArgumentError as exc:
                yield InvalidArgumentError(exc.field.replace("[0]", f"[{index}]", 1), exc.value, exc.remedy)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _validated(model: type[M], value: Any) -> tuple[M | None, list[ErrorDetails]]:
    try:
        return model.model_validate(value), []
    except ValidationError as exc:
        return None, exc.errors(include_url=False)


def _without(value: Any, wrong: set[str]) -> PromptEntry | None:
    """Return the rest of an entry, with any name if it has none; None: it is no table."""
    if not isinstance(value, Mapping):
        return None
    rest = {key: each for key, each in value.items() if key not in wrong}
    return PromptEntry.model_validate(rest | ({"name": "x"} if "name" in wrong else {}))


def _schema_error(model: type[BaseModel], document: Document, place: Place, error: ErrorDetails) -> DeclaredError:
    bounds = error.get("ctx", {})
    match error["type"]:
        case "value_error":
            problem = str(bounds["error"])
        case "extra_forbidden":
            return document.error(place, _unknown(PromptHow if "defaults" in place else model, place), at_key=True)
        case "missing":
            problem = f"needs the key {place[-1]}"
            place = place[:-1]
        case "list_type":
            problem = "must be a list"
        case "string_type":
            problem = "must be text; put it in quotes"
        case "bool_type":
            problem = "must be true or false"
        case "int_type":
            problem = "must be a whole number"
        case "greater_than_equal":
            problem = f"must be at least {bounds['ge']}"
        case "less_than_equal":
            problem = f"must be at most {bounds['le']}"
        case "string_too_short":
            problem = "must not be empty"
        case "string_pattern_mismatch":
            problem = "use at most 128 letters, digits and . _ / @ : + -"  # of a set
        case "model_type" | "mapping_type" | "dict_type":
            problem = "must be a table of keys and values"
        case _:
            problem = error["msg"].lower()
    return document.error(place, problem)


def _unknown(model: type[BaseModel], place: Place) -> str:
    known = list(model.model_fields)
    close = difflib.get_close_matches(str(place[-1]), known, n=1, cutoff=0.5)
    return f"no such key; did you mean {close[0]}?" if close else f"no such key; known: {', '.join(known)}"
