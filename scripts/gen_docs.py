#!/usr/bin/env python3
"""Writes pages of docs/ from the code (commands, settings, logs, metrics, the schema of prompt files), and the index of
docs/adr.

With --check: fails when they differ, or when a page for contributors names a file that is not there.

.venv/bin/python scripts/gen_docs.py [--check]
"""

import ast
import html
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from metrics_doc import document as metrics

from kvtier.config.settings import variable_of
from kvtier.doctor import CHECKS
from kvtier.library.declared import json_schema

ROOT = Path(__file__).parents[1]
GENERATED = "<!-- Written by scripts/gen_docs.py from the code; not edited by hand. -->\n"
_COMPLETION = """
## Completion

`kvtier --install-completion` teaches the shell in which it is called (bash, zsh or fish); `kvtier --show-completion`
only prints the script. Names of prompts come from the daemon; one that does not answer within a second has none.
"""
_CONNECTOR = """\
The daemon's flags are in [cli.md](cli.md#kvtier-daemon).

## The connector

It takes these in `kv_connector_extra_config`, a key of `--kv-transfer-config`:

| key | default | meaning |
|---|---|---|
| `socket` | as `server.socket` | the daemon's socket |
| `daemon_uid` | `KVTIER_DAEMON_UID`, else none | the daemon's uid, if neither vLLM's nor root's |
| `chat_template` | the model's | the file that vLLM got by `--chat-template`; system prompts are found by it |
| `admission` | `prefix_first` | requests that need few blocks pass some that wait for a whole prompt's; `fcfs`: none |
| `gpu_pin` | `soft` | vLLM evicts pinned blocks last; `hard`: holds them until requests need them; `off`: neither |
| `lookup_timeout_ms` | 250 | longest wait for a first answer; after a late one lookups miss until the daemon answers |
| `otlp_endpoint` | none | OTLP collector, `http://127.0.0.1:4317`: [spans of requests](metrics.md#spans-of-requests) |
| `prefill_tokens_per_s` | measured | what computing is taken to cost when a promotion or a load is weighed against it |
| `refresh` | true | with `warm_url`: what is not durable is [rendered and computed](concepts.md#prompts-from-files) |
| `safe_rpcs` | `[]` | `collective_rpc` methods that [change no weights](concepts.md#weights-that-change-in-place) |
| `warm_url` | none | this vLLM's own API server, `auto` or its URL: [warm start](concepts.md#after-a-restart) |
| `weights_fingerprint` | `sampled` | `full` hashes every byte of the weights at first start |

It also reads two keys of vLLM's own offloading there, which mean the same: `blocks_per_chunk` (1; vLLM blocks per
stored chunk) and `offload_prompt_only`. Spans for `kvtier trace` are written where `KVTIER_TRACE_FOLDER` says, as the
daemon's are.
"""
_LOGS = """
# Logs

The daemon writes to stderr, one event per line, never a prompt's text or tokens, a cache salt or a credential. Events
are of transitions, not of chunks. `log.level` says from which level on, `log.format` how:

- `text`: `2026-11-21T09:30:00.123Z INFO kvtier.daemon.lifecycle ready pid=1 ...`. A value with blanks, quotes, equals
  signs or line breaks is a JSON string. A traceback follows on lines of its own.
- `json`: one object per line.

| field | meaning |
|---|---|
| `time` | UTC, ISO 8601 with milliseconds |
| `level` | `debug`, `info`, `warning`, `error` |
| `logger` | the module |
| `event` | what happened: a name of the table below, or a library's message |
| `exception` | a traceback, where there is one |

The fields of an event come beside these. Under systemd (when stderr is the journal's) every line begins with its
priority, `<3>` for errors, `<4>` for warnings, `<6>` for info, `<7>` for debug, which the journal takes off and keeps
(`journalctl -p warning`). Text has no time then.

`kvtier-gateway` logs in the same way. The connector logs through vLLM's logger, in vLLM's format.

## Events

| event | level | logger | fields | meaning |
|---|---|---|---|---|
"""
_DECISIONS = """\
# Decisions

Choices that are hard to undo, each with its context, its consequences and what was rejected.

| number | title | status |
|---|---|---|
"""
_MEANINGS = "scripts/log_events.toml"
_HAVE_PATHS = ("CONTRIBUTING.md", "SECURITY.md", "README.md", "docs/architecture.md")


@dataclass
class Entry:
    """Settings that share a comment in configs/kvtier.toml."""

    table: str
    comment: list[str]
    defaults: dict[str, str] = field(default_factory=dict)


def cli() -> str:
    """Return the reference of the programs, as typer writes it, and of the doctor's checks."""
    programs = {
        "kvtier": "kvtier.cli.app",
        "kvtier-daemon": "kvtier.daemon.main",
        "kvtier-gateway": "kvtier.gateway.proxy.gateway_command",
    }
    checks = "".join(f"| `{check}` | {good} |\n" for check, good in CHECKS.items())
    return "\n".join(
        [
            *(_typer_docs(name, module) for name, module in programs.items()),
            _COMPLETION.lstrip(),
            "## What `kvtier doctor` checks\n",
            "Each is `ok`, `warn`, `fail` or `skipped`; with `--json` it has `id`, `status`, `found` and `remedy`.\n",
            "| id | good when |\n|---|---|\n" + checks,
        ]
    )


def _typer_docs(name: str, module: str) -> str:
    command = [sys.executable, "-m", "typer", module, "utils", "docs", "--name", name]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("KVTIER_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return html.unescape(done.stdout).rstrip() + "\n"


def configuration() -> str:
    """Return the reference of the settings: what configs/kvtier.toml says, and each setting's variable."""
    header, _, rest = (ROOT / "configs" / "kvtier.toml").read_text().partition("\n[")
    parts = ["# Configuration\n", _prose(header.splitlines()) + "\n", _CONNECTOR]
    table = ""
    for entry in _entries(("[" + rest).splitlines()):
        if entry.table != table:
            table = entry.table
            parts.append(f"## [{table}]\n")
        parts.append("### " + ", ".join(f"`{name}`" for name in entry.defaults) + "\n")
        parts += [f"- `{name} = {default}`, `{_variable(table, name)}`" for name, default in entry.defaults.items()]
        parts.append("\n" + _prose(entry.comment) + "\n")
    return "\n".join(parts)


def _entries(lines: list[str]) -> Iterator[Entry]:
    table, entry = "", Entry("", [])
    for line in [*lines, ""]:
        if line.startswith("["):
            table = line.strip("[]")
        elif setting := re.fullmatch(r"#(\w+) = (.*)", line):
            entry.defaults[setting[1]] = setting[2]
        elif line.startswith("#"):
            entry.comment.append(line)
        elif entry.defaults:
            yield entry
        if not line.startswith("#"):
            entry = Entry(table, [])


def _variable(table: str, name: str) -> str:
    return variable_of(f"{table}.{name}")


def _prose(comment: list[str]) -> str:
    # <uid> would be a tag in Markdown.
    return "\n".join(line.removeprefix("#").removeprefix(" ").replace("<", r"\<") for line in comment)


def logs() -> str:
    """Return what is logged: every call of `log_event` in the daemon's code, and what log_events.toml says of it."""
    rows = sorted({(row, event) for path in sorted((ROOT / "kvtier").rglob("*.py")) for event, row in _events(path)})
    meanings: dict[str, str] = tomllib.loads((ROOT / _MEANINGS).read_text())["meaning"]
    _check_meanings({event for _, event in rows}, meanings)
    return _LOGS.lstrip() + "".join(f"{row} {meanings[event]} |\n" for row, event in rows)


def _check_meanings(events: set[str], meanings: Mapping[str, str]) -> None:
    if missing := sorted(event for event in events if not meanings.get(event)):
        sys.exit(f"{_MEANINGS} does not say what these events mean: {', '.join(missing)}")
    if superfluous := sorted(meanings.keys() - events):
        sys.exit(f"{_MEANINGS} has what no code logs: {', '.join(superfluous)}")


def _events(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each event that a module logs, and its row up to the meaning."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    tree = ast.parse(path.read_text())
    chosen = [ast.unparse(node.value) for node in ast.walk(tree) if isinstance(node, ast.Assign) and _names_level(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "log_event":
            event = ast.literal_eval(node.args[1])
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg}
            level = given.pop("level", "logging.INFO")
            levels = re.findall(r"logging\.(\w+)", level if "logging." in level else " ".join(chosen))
            shown = " or ".join(sorted({each.lower() for each in levels}))
            yield event, f"| `{event}` | {shown} | {module} | {', '.join(f'`{name}`' for name in given)} |"


def _names_level(node: ast.Assign) -> bool:
    return any(isinstance(target, ast.Name) and target.id == "level" for target in node.targets)


def decisions() -> str:
    """Return the index of the ADRs: number, title and status, as each says them in its first lines."""
    rows = ""
    for path in sorted((ROOT / "docs" / "adr").glob("0*.md")):
        head = re.match(r"# (\d+)\. (.+)\n\nStatus: ((?:.+\n)+)\n", path.read_text())
        if head is None:
            sys.exit(f"{path.relative_to(ROOT)} must begin with '# NUMBER. TITLE', an empty line and 'Status: ...'")
        rows += f"| [{head[1]}]({path.name}) | {head[2]} | {' '.join(head[3].split())} |\n"
    return _DECISIONS + rows


def missing_paths(text: str) -> list[str]:
    """Return the paths of this repository that a page names in backticks and that do not exist."""
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()}
    named = re.findall(r"`([\w.-]+/[\w./*-]*)`", text)
    return sorted({path for path in named if path.split("/")[0] in folders and not any(ROOT.glob(path.rstrip("/")))})


def main() -> None:
    """Write the files, or compare."""
    check = sys.argv[1:] == ["--check"]
    for name in _HAVE_PATHS:
        if check and (missing := missing_paths((ROOT / name).read_text())):
            sys.exit(f"{name} names what is not there: {', '.join(missing)}")
    documents = {"cli.md": cli(), "configuration.md": configuration(), "logs.md": logs(), "metrics.md": metrics()}
    documents["adr/README.md"] = decisions()
    documents["prompts.schema.json"] = json.dumps(json_schema(), indent=2) + "\n"
    for name, text in documents.items():
        path = ROOT / "docs" / name
        text = text if name.endswith(".json") else f"{GENERATED}\n{text}"
        if not check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            sys.exit(f"docs/{name} is out of date: run .venv/bin/python scripts/gen_docs.py")


if __name__ == "__main__":
    main()
