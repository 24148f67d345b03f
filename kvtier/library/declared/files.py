"""Reads the files of declared prompts, with all that they refer to, and finds every mistake before anything is done."""

import difflib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kvtier.core import limits
from kvtier.core.ttl import seconds_of
from kvtier.errors import InvalidArgumentError, RenderError
from kvtier.json_text import JsonError, read_json
from kvtier.library.declared.documents import (
    NO_VALUE,
    DeclaredError,
    DeclaredErrors,
    Document,
    Place,
    read_documents,
    with_whole_escapes,
)
from kvtier.library.declared.file_schema import SET_LABEL, SOURCES, PromptEntry, PromptHow, PromptsFile
from kvtier.library.rendering.recipe import Recipe, recipe_of

MAX_FILE_BYTES = 256 * 1024**2
SUFFIXES = (".yaml", ".yml", ".json")
STDIN = "-"
M = TypeVar("M", bound=BaseModel)
_PART = re.compile(r"\[(\d+)\]|([^.\[\]]+)")


@dataclass(frozen=True, kw_only=True)
class DeclaredPrompt:
    """One prompt as a file wants it.

    Attributes:
        recipe: Its source.
        tokens: Token ids, for a source of that kind.
        model: Served model or LoRA adapter; empty: the first that vLLM serves.
        labels: With that of its set.
        place: `file:line:column`, for messages.
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
    place: str = ""


@dataclass(frozen=True, kw_only=True)
class DeclaredSet:
    """All prompts of the files, by name, and the names of their sets."""

    prompts: Mapping[str, DeclaredPrompt]
    set_names: frozenset[str]


def read_declared(paths: Sequence[str]) -> DeclaredSet:
    """Read files, and folders with their .yaml, .yml and .json files (not those of folders in them); `-` is stdin.

    Raises:
        DeclaredErrors: With all mistakes of all files.
    """
    errors: list[DeclaredError] = []
    prompts: dict[str, DeclaredPrompt] = {}
    set_names: set[str] = set()
    for path in _files(paths, errors):
        base = Path() if path == STDIN else Path(path).parent
        try:
            text = read_text(path)
            documents = read_documents(path, with_whole_escapes(text) if path.endswith(".json") else text)
        except DeclaredErrors as exc:
            errors += exc.errors
            continue
        except ValueError as exc:
            errors.append(DeclaredError(path, 0, 0, "", NO_VALUE, str(exc)))
            continue
        for document in documents:
            file = _checked(PromptsFile, document, (), document.value, errors)
            file = file or PromptsFile(prompts=[])  # what is wrong in the prompts is said, too
            set_names.add(file.set)
            for index, value in enumerate(_entries(document)):
                entry = _checked(PromptEntry, document, ("prompts", index), value, errors)
                if entry is None:
                    continue
                prompt = _prompt(document, file, index, entry, base, errors)
                if prompt is None:
                    continue
                if (first := prompts.get(prompt.name)) is not None:
                    problem = f"is the name of the prompt at {first.place}, too; give each prompt another name"
                    errors.append(document.error(("prompts", index, "name"), problem))
                else:
                    prompts[prompt.name] = prompt
    if errors:
        raise DeclaredErrors(errors)
    return DeclaredSet(prompts=prompts, set_names=frozenset(set_names))


def read_text(path: str) -> str:
    """Return the text of a file or of stdin.

    Raises:
        ValueError: It cannot be read, is no UTF-8, or is longer than any file of prompts.
    """
    if "\0" in path:
        raise ValueError("cannot be read: a path has no NUL")
    try:
        with nullcontext(sys.stdin.buffer) if path == STDIN else Path(path).open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise ValueError(f"has more than {MAX_FILE_BYTES} bytes; no prompt is that long")
        return raw.decode("utf-8")
    except OSError as exc:
        raise ValueError(f"cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ValueError(f"is not UTF-8 text (byte {exc.start}); save it as UTF-8") from exc


def _files(paths: Iterable[str], errors: list[DeclaredError]) -> Iterator[str]:
    for path in paths:
        try:
            if path == STDIN or not Path(path).is_dir():
                yield path
                continue
            found = sorted(str(each) for each in Path(path).iterdir() if each.suffix in SUFFIXES and each.is_file())
        except (OSError, ValueError) as exc:  # the latter: a NUL
            errors.append(DeclaredError(path, 0, 0, "", NO_VALUE, f"cannot be read: {exc}"))
            continue
        if not found:
            problem = f"is a folder without {', '.join(SUFFIXES)} files; name a file, or the folder that has them"
            errors.append(DeclaredError(path, 0, 0, "", NO_VALUE, problem))
        yield from found


def _entries(document: Document) -> list[Any]:
    """Return the prompts of a document, which the schema of a file does not look into: each has errors of its own."""
    entries = document.value.get("prompts") if isinstance(document.value, dict) else None
    return entries if isinstance(entries, list) else []


def _checked(model: type[M], document: Document, where: Place, value: Any, errors: list[DeclaredError]) -> M | None:
    try:
        return model.model_validate(value)
    except ValidationError as exc:
        found = exc.errors(include_url=False)
        errors += [_schema_error(model, document, (*where, *error["loc"]), error) for error in found]
        return None


def _schema_error(model: type[BaseModel], document: Document, place: Place, error: ErrorDetails) -> DeclaredError:
    match error["type"]:
        case "value_error":
            problem = str(error["ctx"]["error"])
        case "extra_forbidden":
            problem = _unknown(PromptHow if "defaults" in place else model, place)
        case "missing":
            problem = f"needs the key {place[-1]}"
            place = place[:-1]
        case "list_type":
            problem = "must be a list"
        case "string_type":
            problem = "must be text; put it in quotes"
        case "model_type" | "mapping_type" | "dict_type":
            problem = "must be a table of keys and values"
        case _:
            problem = error["msg"].lower()
    return document.error(place, problem)


def _unknown(model: type[BaseModel], place: Place) -> str:
    known = list(model.model_fields)
    close = difflib.get_close_matches(str(place[-1]), known, n=1, cutoff=0.5)
    return f"no such key; did you mean {close[0]}?" if close else f"no such key; known: {', '.join(known)}"


def _prompt(
    document: Document, file: PromptsFile, index: int, entry: PromptEntry, base: Path, errors: list[DeclaredError]
) -> DeclaredPrompt | None:
    where: Place = ("prompts", index)
    given = [name for name in SOURCES if getattr(entry, name) is not None]
    if len(given) != 1:
        found = "has none" if not given else f"has {' and '.join(given)}"
        errors.append(document.error((*where, "name"), f"{found}; give one of {', '.join(SOURCES)}"))
        return None
    if entry.tools is not None and entry.tools_file is not None:
        errors.append(document.error((*where, "tools_file"), "cannot go with tools; give one of them"))
        return None
    own = entry.model_fields_set
    how = {name: getattr(entry if name in own else file.defaults, name) for name in PromptHow.model_fields}
    if how["public"] and how["cache_salt"]:
        errors.append(document.error((*where, "public"), "a public prompt has no cache_salt; leave one out"))
        return None
    if how["sliding"] and not seconds_of(how["ttl"]):
        errors.append(document.error((*where, "sliding"), "needs a ttl: the time from each use to the end"))
        return None
    labels = {**file.defaults.labels, **entry.labels, SET_LABEL: file.set}
    if len(labels) > limits.NUM_LABELS.most:
        problem = f"has {len(labels)} labels with that of its set; at most {limits.NUM_LABELS.most} are supported"
        errors.append(document.error((*where, "labels"), problem))
        return None
    source = _source(document, where, given[0], entry, base, errors)
    if source is None:
        return None
    recipe, tokens = source
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
        labels=labels,
        place=document.shown_place(where),
    )


def _source(
    document: Document, where: Place, given: str, entry: PromptEntry, base: Path, errors: list[DeclaredError]
) -> tuple[Recipe, tuple[int, ...]] | None:
    """Return recipe and tokens of an entry; None: what is wrong is in `errors`."""
    values: dict[str, Any] = {"chat_template_kwargs": _plain(entry.chat_template_kwargs)}
    for name in (given, *(each for each in ("tools", "tools_file") if getattr(entry, each) is not None)):
        value, field_name = _plain(getattr(entry, name)), name.removesuffix("_file")
        if name.endswith("_file"):
            try:
                text = read_text(str(base / value))
                value = text if field_name in ("system", "text") else read_json(text)
            except (ValueError, JsonError) as exc:
                errors.append(document.error((*where, name), str(exc)))
                return None
        values[field_name] = value
    messages = values.get("messages")
    if isinstance(messages, dict) and "messages" in messages:  # a whole chat request
        for name in ("tools", "chat_template_kwargs"):
            values[name] = values.get(name) or messages.get(name)
        values["messages"] = messages["messages"]
    if isinstance(values.get("tokens"), dict):
        values["tokens"] = values["tokens"].get("tokens")
    try:
        made = recipe_of(**values)
    except InvalidArgumentError as exc:
        parts = tuple(int(number) if number else key for number, key in _PART.findall(exc.field))
        place = (*where, f"{parts[0]}_file") if given.endswith("_file") and parts[:1] else (*where, *parts)
        errors.append(document.error(place, f"{exc.field}: {exc.remedy}" if given.endswith("_file") else exc.remedy))
        return None
    except RenderError as exc:
        errors.append(document.error(where, str(exc)))
        return None
    if made is None:
        errors.append(document.error((*where, given), "is empty; there is nothing to pin"))
    return made


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
