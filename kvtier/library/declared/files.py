"""Reads the files of declared prompts, with all that they refer to, and finds every mistake before anything is done."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvtier.json_text import JsonError
from kvtier.library.declared.documents import (
    NO_VALUE,
    DeclaredError,
    DeclaredErrors,
    Document,
    read_documents,
    read_json_document,
)
from kvtier.library.declared.entries import DeclaredPrompt, EntryCheck, FileCheck, entries_of
from kvtier.library.declared.read_text import STDIN, read_text

_TEXT = "text"
"""What errors call a text that is no file."""
SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True, kw_only=True)
class DeclaredSet:
    """All prompts of the files, by name, the names of their sets, and the files that are empty."""

    prompts: Mapping[str, DeclaredPrompt]
    set_names: frozenset[str]
    empty_files: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class _File:
    """One file, read.

    Attributes:
        is_named: By its own path, not by that of its folder.
        errors: Why it has no documents.
        is_text: It is no file, and may name none.
    """

    path: str
    is_named: bool
    documents: Sequence[Document] = ()
    errors: Sequence[DeclaredError] = ()
    is_text: bool = False

    @property
    def base(self) -> Path | None:
        """The folder that paths in it are relative to; None: it may name none."""
        if self.is_text:
            return None
        return Path() if self.path == STDIN else Path(self.path).parent


def read_declared(paths: Sequence[str]) -> DeclaredSet:
    """Read files, and folders with their .yaml, .yml and .json files (not those of folders in them); `-` is stdin.

    Of a folder's files, those that others name as a source (`tools_file: tools.json`) are no files of prompts.

    Raises:
        DeclaredErrors: With all mistakes of all files.
    """
    return _checked(list(_files(paths)))


def read_declared_text(text: str, *, in_turns: bool = False) -> DeclaredSet:
    """Read the text of a file, YAML or JSON, which may name no other file: it may come from another host.

    Args:
        text: Of the file.
        in_turns: See `read_documents`.

    Raises:
        DeclaredErrors: With all mistakes; the name of the file is `text`.
    """
    documents = _documents_of_text(_TEXT, text, in_turns=in_turns)
    return _checked([_File(path=_TEXT, is_named=True, documents=documents, is_text=True)])


def _documents_of_text(source: str, text: str, *, in_turns: bool = False) -> list[Document]:
    """Return the documents of a text whose name does not say whether it is JSON or YAML."""
    if text.lstrip().startswith(("{", "[")):
        with suppress(JsonError):  # YAML may begin so, too
            return read_json_document(source, text, in_turns=in_turns)
    return read_documents(source, text, in_turns=in_turns)


def _checked(files: list[_File]) -> DeclaredSet:
    if any(not file.is_named for file in files):
        sources = {path for file in files for path in _named_sources(file)}
        files = [file for file in files if file.is_named or os.path.realpath(file.path) not in sources]
    errors: list[DeclaredError] = []
    prompts: dict[str, DeclaredPrompt] = {}
    set_names: set[str] = set()
    first_of: dict[str, EntryCheck] = {}
    for file in files:
        found = list(file.errors)
        for document in file.documents:
            said = FileCheck(document)
            found += said.errors
            set_names.add(said.file.set)
            for index, value in enumerate(entries_of(document)):
                check = EntryCheck(document, said, index, value, file.base)
                found += check.errors
                if (first := first_of.get(check.name)) is not None:
                    problem = f"is the name of the prompt at {first.place}, too; give each prompt another name"
                    found.append(document.error(("prompts", index, "name"), problem))
                elif check.name:
                    first_of[check.name] = check
                if check.prompt is not None:
                    prompts[check.name] = check.prompt
        errors += sorted(found, key=lambda error: (error.line, error.column))
    if errors:
        raise DeclaredErrors(errors)
    empty = [file.path for file in files if not file.documents]
    return DeclaredSet(prompts=prompts, set_names=frozenset(set_names - {""}), empty_files=empty)


def _files(paths: Iterable[str]) -> Iterator[_File]:
    seen: dict[str, str] = {}
    for path, is_named in _paths(paths):
        if not path:
            yield _unread(path, "is empty; name a file or a folder")
            continue
        same = path if path == STDIN or "\0" in path else os.path.realpath(path)
        if (first := seen.get(same)) is None:
            seen[same] = path
            yield _read(path, is_named=is_named)
        else:
            problem = f"is the same file as {first}, which is given too" if first != path else "is given twice"
            yield _unread(path, f"{problem}; name it once")


def _paths(paths: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yield the path of each file, and whether it was named itself; a folder without files as it was named."""
    for path in paths:
        found: list[str] = []
        with suppress(OSError):  # reading it says why
            # Path("") is the current folder: `-f "$FOLDER"` with the variable unset would apply that.
            if path and path != STDIN and "\0" not in path and Path(path).is_dir():
                found = sorted(str(each) for each in Path(path).iterdir() if _is_of_folder(each))
        yield from ((each, False) for each in found)
        if not found:
            yield path, True


def _is_of_folder(path: Path) -> bool:
    """Return whether a file of a folder is read: also a link that leads nowhere, whose pins --prune would end.

    A link that Emacs makes while a file is edited (`.#prompts.yaml`) leads nowhere by intent.
    """
    is_broken = path.is_symlink() and not path.exists() and not path.name.startswith(".#")
    return path.suffix in SUFFIXES and (path.is_file() or is_broken)


def _read(path: str, *, is_named: bool) -> _File:
    try:
        if path != STDIN and "\0" not in path and Path(path).is_dir():
            os.scandir(path).close()
            raise ValueError(  # noqa: TRY301
                f"is a folder without {', '.join(SUFFIXES)} files; name a file, or the folder that has them"
            )
        text = read_text(path)
        return _File(path=path, is_named=is_named, documents=_documents(path, text))
    except DeclaredErrors as exc:
        return _File(path=path, is_named=is_named, errors=exc.errors)
    except JsonError as exc:
        error = DeclaredError(path, exc.line, exc.column, "", NO_VALUE, str(exc))
        return _File(path=path, is_named=is_named, errors=[error])
    except OSError as exc:
        return _unread(path, f"cannot be read: {exc.strerror}")
    except ValueError as exc:
        return _unread(path, str(exc))


def _documents(path: str, text: str) -> list[Document]:
    """Return the documents of a file. DeclaredErrors, JsonError: it is neither YAML nor JSON as its name says."""
    if path.endswith(".json") and text.strip():
        return read_json_document(path, text)
    return _documents_of_text(path, text) if path == STDIN else read_documents(path, text)


def _unread(path: str, problem: str) -> _File:
    return _File(path=path, is_named=True, errors=[DeclaredError(path, 0, 0, "", NO_VALUE, problem)])


def _named_sources(file: _File) -> Iterator[str]:
    """Yield the real paths of the files that a file's prompts have as their sources."""
    for document in file.documents:
        for entry in entries_of(document):
            for key, value in entry.items() if isinstance(entry, dict) else ():
                if key.endswith("_file") and isinstance(value, str) and "\0" not in value:
                    yield os.path.realpath(Path(file.path).parent / value)
