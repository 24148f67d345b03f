#!/usr/bin/env python3
"""Finds words that a reader would have to decode, and lines beyond 120 columns; scripts/words.toml has the words.

Python and proto files are read whole: names, comments, strings, and a module's own name. In Markdown, code is left out
of the search for words, because it quotes what is written elsewhere; so are names with underscores in all other files.

scripts/words_baseline.toml says how many findings each folder may still have. The numbers only fall.

usage: scripts/check_words.py            fail where a folder has more than its number
       scripts/check_words.py PATH ...   list the findings in these files and folders
       scripts/check_words.py --lower    write the baseline where there are fewer
"""

import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COLUMNS = 120
_WORDS = ROOT / "scripts" / "words.toml"
_BASELINE = ROOT / "scripts" / "words_baseline.toml"
_BASELINE_HEAD = """\
# Findings of scripts/check_words.py that each folder may still have (`.`: the files of the root).
# A number only falls: `.venv/bin/python scripts/check_words.py --lower` writes it.
"""
_GENERATED = "<!-- Written by scripts/gen_docs.py"
_CODE_BLOCK = re.compile(r"^( *)(```|~~~).*?^\1\2", re.MULTILINE | re.DOTALL)
_CODE_SPAN = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_LINK_TARGET = re.compile(r"\]\([^)\s]*\)")
_QUOTED_NAME = re.compile(r"\w*[^\W_]_\w+|https?://\S+")
_CAMEL_CASE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_LINE_START = re.compile(r"^[ \t]*(#+|//+|>+|\*)(?= )", re.MULTILINE)
_LIST_MARK = re.compile(r"\s*([-*>#]+|\d+\.|\[[^]]+\]:)?\s*")


@dataclass(frozen=True)
class Finding:
    """A place that should read otherwise."""

    path: str
    line: int
    found: str
    better: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.found}: {self.better}"


class Rules:
    """What words.toml says."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._skip: list[str] = document.get("skip", [])
        self._allowed: dict[str, list[str]] = document.get("allowed", {})
        self._words = {pattern: _word(pattern) for pattern in document["words"]}
        self._names = {name: re.compile(rf"\b{name}\b") for name in document.get("names", {})}
        self._better: dict[str, str] = document["words"] | document.get("names", {})

    def findings(self, path: str, text: str) -> list[Finding]:
        """Return what is wrong with a file, in the order of its lines."""
        if _any_matches(path, self._skip) or text.startswith(_GENERATED):
            return []
        return sorted([*self._bad_words(path, text), *_long_lines(path, text)], key=lambda finding: finding.line)

    def _bad_words(self, path: str, text: str) -> Iterator[Finding]:
        # Line 0 is the name of a module.
        text = f"{Path(path).stem if path.endswith('.py') else ''}\n{text}"
        readable = _readable(path, text)
        patterns = [(key, regex, readable) for key, regex in self._words.items()]
        if path.endswith(".py"):
            patterns += [(key, regex, text) for key, regex in self._names.items()]
        for key, regex, searched in patterns:
            if not _any_matches(path, self._allowed.get(key, ())):
                for match in regex.finditer(searched):
                    found = " ".join(match[0].split())
                    yield Finding(path, searched.count("\n", 0, match.start()), found, self._better[key])


def _word(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{pattern})\b".replace(" ", r"[\s-]+"), re.IGNORECASE)


def _any_matches(path: str, globs: Iterable[str]) -> bool:
    return any(fnmatch(path, glob) for glob in globs)


def _readable(path: str, text: str) -> str:
    """Return the text in which words are searched: on the same lines, as words with blanks between."""
    if path.endswith(".md"):
        for code in (_CODE_BLOCK, _CODE_SPAN, _LINK_TARGET):
            text = code.sub(_blank, text)
    elif path.endswith((".py", ".proto")):
        text = _CAMEL_CASE.sub(" ", text).replace("_", " ")
    else:
        text = _QUOTED_NAME.sub(_blank, text)
    return _LINE_START.sub(" ", text)


def _blank(match: re.Match[str]) -> str:
    # No blank: what stands on both sides of code is no phrase.
    return "`" + "\n" * match[0].count("\n") + "`"


def _long_lines(path: str, text: str) -> Iterator[Finding]:
    # ruff checks Python; boards for Grafana are edited there.
    if path.endswith((".py", ".json")):
        return
    for number, line in enumerate(text.splitlines(), 1):
        is_table = path.endswith(".md") and line.lstrip().startswith("|")
        can_be_broken = " " in line[_LIST_MARK.match(line).end() :].strip()  # type: ignore[union-attr]  # matches ""
        if len(line) > COLUMNS and can_be_broken and not is_table:
            yield Finding(path, number, f"{len(line)} columns", f"at most {COLUMNS}")


def repository_files() -> Iterator[tuple[str, str]]:
    """Yield path and text of every text file that git does not ignore."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    paths = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for path in sorted({path for path in paths if path and (ROOT / path).is_file()}):
        try:
            yield path, (ROOT / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def folder_of(path: str) -> str:
    """Return the top folder, which has a number in the baseline."""
    return path.split("/")[0] if "/" in path else "."


def over_baseline(findings: Iterable[Finding], baseline: dict[str, int]) -> list[Finding]:
    """Return the findings of the folders that have more than they may."""
    findings = list(findings)
    counts = Counter(folder_of(finding.path) for finding in findings)
    return [
        finding for finding in findings if counts[folder_of(finding.path)] > baseline.get(folder_of(finding.path), 0)
    ]


def lowered(findings: Iterable[Finding], baseline: dict[str, int]) -> dict[str, int]:
    """Return the baseline with each number at what there is, where that is less."""
    counts = Counter(folder_of(finding.path) for finding in findings)
    return {folder: min(allowed, counts[folder]) for folder, allowed in baseline.items() if counts[folder]}


def main(arguments: list[str]) -> int:
    """Check, list or lower."""
    rules = Rules(tomllib.loads(_WORDS.read_text()))
    findings = [finding for path, text in repository_files() for finding in rules.findings(path, text)]
    baseline: dict[str, int] = tomllib.loads(_BASELINE.read_text()) if _BASELINE.exists() else {}
    if arguments == ["--lower"]:
        rows = "".join(f'"{folder}" = {number}\n' for folder, number in lowered(findings, baseline).items())
        _BASELINE.write_text(_BASELINE_HEAD + rows)
        return 0
    if arguments:
        globs = [glob for path in arguments for glob in (path.rstrip("/"), f"{path.rstrip('/')}/*")]
        bad = [finding for finding in findings if _any_matches(finding.path, globs)]
    else:
        bad = over_baseline(findings, baseline)
    for finding in bad:
        print(finding)
    for folder, number in sorted(Counter(folder_of(finding.path) for finding in bad).items()):
        print(f"{folder}: {number} findings, {baseline.get(folder, 0)} allowed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
