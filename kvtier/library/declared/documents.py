"""YAML with places: values for people's mistakes to be found in, at line and column."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from kvtier.errors import KvtierError
from kvtier.json_text import read_json
from kvtier.printable import MAX_LISTED, printable, shown_value

MAX_DEPTH = 64
MAX_VALUES = 1_000_000
"""That aliases repeat: few of them can stand for billions of scalars, lists and tables."""
_SHOWN_KEYS = {
    *("name", "set", "model", "ttl", "sliding", "priority", "public", "owner", "labels", "role"),
    *("system_file", "messages_file", "text_file", "tokens_file", "tools_file"),
}
"""Whose values errors quote. All others may be a prompt's text, or a salt."""
_PLAIN_TAGS = {"str", "int", "float", "bool", "null"}
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_QUICK_NODES = 10_000
"""That libyaml reads in some 20 ms."""

_TWO_ESCAPES = re.compile(r"((?<!\\)(?:\\\\)*)(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})")

Place = tuple[str | int, ...]
"""Keys and indexes from the root."""
NO_VALUE = object()
"""Of an error that is not about a value."""


class DeclaredError(KvtierError):
    """One mistake in a file of prompts.

    Attributes:
        source: The file.
        line: From 1; 0: all of the file.
        column: From 1.
        field: Dotted, as `prompts[3].ttl`.
    """

    def __init__(self, source: str, line: int, column: int, field: str, value: object, problem: str) -> None:
        place = f"{source}:{line}:{column}" if line else source
        shown = "" if value is NO_VALUE else f" = {shown_value(value)}"
        what = f" {printable(field)}{shown}:" if field else ""
        super().__init__(f"{place}:{what} {problem}")
        self.source, self.line, self.column, self.field, self.value = source, line, column, field, value


class DeclaredErrors(KvtierError):
    """All mistakes of the files: `errors`. Nothing was applied."""

    def __init__(self, errors: Sequence[DeclaredError]) -> None:
        self.errors = tuple(errors)
        more = len(errors) - MAX_LISTED
        lines = [str(error) for error in errors[:MAX_LISTED]] + ([f"and {more} more"] if more > 0 else [])
        super().__init__("; ".join(lines))


@dataclass(frozen=True)
class Document:
    """One YAML document of a file."""

    source: str
    node: Any
    value: Any

    def error(self, place: Place, problem: str, *, at_key: bool = False) -> DeclaredError:
        """Return the error of a place; the nearest place that is there gives line and column.

        Args:
            at_key: It is about the key, not about its value.
        """
        node = _node_at(self.node, place)
        mark = (_key_at(self.node, place) if at_key else node).start_mark
        return DeclaredError(self.source, mark.line + 1, mark.column + 1, dotted(place), _shown(node, place), problem)

    def mark(self, place: Place) -> tuple[str, int, int]:
        """Return file, line and column of a place."""
        mark = _node_at(self.node, place).start_mark
        return self.source, mark.line + 1, mark.column + 1


def dotted(place: Place) -> str:
    """Return a place as people write it."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.removeprefix(".")


def read_documents(source: str, text: str, *, in_turns: bool = False) -> list[Document]:
    """Return the documents of a file of YAML.

    Args:
        source: The file, for errors.
        text: Of the file.
        in_turns: Let other threads run while a long one is read, though that takes twenty times as long: libyaml holds
            the interpreter until it ends.

    Raises:
        DeclaredErrors: It is no YAML, or uses what has no place in a file of prompts.
    """
    is_long = sum(map(text.count, "\n,[{")) > _QUICK_NODES
    loader = yaml.SafeLoader if in_turns and is_long else _LOADER
    try:
        _check_depth(source, text)
        nodes = [node for node in yaml.compose_all(text, Loader=loader) if node is not None]
        return [Document(source, node, _Values(source).of(node, ())) for node in nodes]
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark is not None else (0, 0)
        raise DeclaredErrors([DeclaredError(source, line, column, "", NO_VALUE, f"is no YAML: {exc.problem}")]) from exc
    except yaml.YAMLError as exc:  # a character that YAML has not
        raise DeclaredErrors([DeclaredError(source, 0, 0, "", NO_VALUE, f"is no YAML: {exc}")]) from exc
    except RecursionError as exc:
        raise DeclaredErrors([DeclaredError(source, 0, 0, "", NO_VALUE, "nests too deep")]) from exc


def read_json_document(source: str, text: str, *, in_turns: bool = False) -> list[Document]:
    """Return the document of a file of JSON. Arguments as of `read_documents`.

    JSON is YAML, and places are found by YAML's nodes. But YAML 1.1 reads `1e3` as text and folds a next line
    character, and a prompt with other tokens than its requests would never hit: values are those of JSON.

    Raises:
        JsonError: It is no JSON.
        DeclaredErrors: It has what has no place in a file of prompts: a key twice, too many levels.
    """
    value = read_json(text.removeprefix("\ufeff"), in_turns=in_turns)
    documents = read_documents(source, _with_whole_escapes(text), in_turns=in_turns)
    return [replace(document, value=value) for document in documents]


def _check_depth(source: str, text: str) -> None:
    """Refuse what nests too deep before nodes are made of it: libyaml's reader of nodes calls itself, without a bound.

    100,000 open brackets in a file ended the process.
    """
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH + 1:
            mark = event.start_mark
            problem = "has too much in it: lists or tables nest too deep"
            raise DeclaredErrors([DeclaredError(source, mark.line + 1, mark.column + 1, "", NO_VALUE, problem)])


class _Values:
    """Values of nodes; finds what a plain reader of YAML lets pass: a key twice, an alias of itself."""

    def __init__(self, source: str) -> None:
        self._source, self._num_repeated, self._seen = source, 0, set[int]()
        self._scalars = yaml.SafeLoader("")

    def of(self, node: Any, place: Place) -> Any:
        self._num_repeated += id(node) in self._seen
        self._seen.add(id(node))
        if len(place) > MAX_DEPTH or self._num_repeated > MAX_VALUES:
            raise self._error(node, place, "has too much in it: aliases multiply, or tables nest too deep")
        if isinstance(node, yaml.MappingNode):
            return self._table(node, place)
        if isinstance(node, yaml.SequenceNode):
            return [self.of(item, (*place, index)) for index, item in enumerate(node.value)]
        kind = node.tag.rpartition(":")[2]
        if kind == "str":
            return node.value
        if kind not in _PLAIN_TAGS:
            raise self._error(node, place, f"is read as {kind}; put it in quotes")
        try:
            return self._scalars.construct_object(node)
        except (ValueError, LookupError, yaml.YAMLError) as exc:  # of a tag that is written out, `!!bool maybe`
            # What it says itself quotes the value, which may be a prompt's text.
            raise self._error(node, place, f"cannot be read as {kind}; put text in quotes, without a tag") from exc

    def _table(self, node: Any, place: Place) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag.endswith(":merge"):
                raise self._error(key_node, place, "must have plain keys; write merged keys out")
            if key in table:
                raise self._error(key_node, (*place, key), "comes twice; leave one out", NO_VALUE)
            table[key] = self.of(value_node, (*place, key))
        return table

    def _error(self, node: Any, place: Place, problem: str, value: object = None) -> DeclaredErrors:
        mark = node.start_mark
        shown = _shown(node, place) if value is None else value
        error = DeclaredError(self._source, mark.line + 1, mark.column + 1, dotted(place), shown, problem)
        return DeclaredErrors([error])


def _with_whole_escapes(text: str) -> str:
    """Return JSON in which no character is written as two escapes: JSON may have that, YAML may not."""
    return _TWO_ESCAPES.sub(lambda found: found[1] + json.loads(f'"{found[2]}"'), text)


def _node_at(node: Any, place: Place) -> Any:
    """Return the node of a place, or the nearest one above it."""
    for part in place:
        child = next(_children(node, part), None)
        if child is None:
            break
        node = child
    return node


def _key_at(node: Any, place: Place) -> Any:
    """Return the node of the key that ends a place, or of the table that should have it."""
    table = _node_at(node, place[:-1])
    keys = [key for key, _ in table.value if key.value == place[-1]] if isinstance(table, yaml.MappingNode) else []
    return keys[0] if keys else table


def _shown(node: Any, place: Place) -> object:
    """Return what to show of a node: a scalar as it is written, if it can be no text of a prompt."""
    key = next((part for part in reversed(place) if isinstance(part, str)), "")
    is_shown = key in _SHOWN_KEYS or "labels" in place
    return node.value if isinstance(node, yaml.ScalarNode) and is_shown else NO_VALUE


def _children(node: Any, part: str | int) -> Iterator[Any]:
    if isinstance(node, yaml.MappingNode):
        yield from (value for key, value in node.value if key.value == part)
    elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        yield node.value[part]
