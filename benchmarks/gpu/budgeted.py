"""Sections of a run one after the other, within a budget of seconds; what each printed stays if it is cut."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CLEANUP_S = 30.0
"""For a section that is stopped to end its servers."""
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Section:
    """A command with a name.

    Attributes:
        least_s: It is left out when less of the budget remains.
    """

    name: str
    argv: Sequence[str]
    least_s: float


def run_sections(sections: Sequence[Section], budget_s: float, out: Path) -> bool:
    """Run them, and write `NAME.txt` for each and `gpu.md` with all; return whether each was run and succeeded."""
    out.mkdir(parents=True, exist_ok=True)
    deadline_s = time.monotonic() + budget_s
    states: dict[str, str] = {}
    for section in sections:
        left_s = deadline_s - time.monotonic() - CLEANUP_S
        if left_s < section.least_s:
            states[section.name] = f"left out: {max(0, left_s):.0f} s were left, it needs {section.least_s:.0f}"
        else:
            states[section.name] = _run(section, left_s, out / f"{section.name}.txt")
        print(f"{section.name}: {states[section.name]}", flush=True)
        _write_page(states, out)
    return all(state == "done" for state in states.values())


def _run(section: Section, timeout_s: float, path: Path) -> str:
    """Run one; return how it ended. Its children are its own to end: it is asked to first, then killed."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": _python_path()}
    with path.open("w") as log:
        process = subprocess.Popen(section.argv, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(CLEANUP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return f"cut after {timeout_s:.0f} s"
        except BaseException:
            process.send_signal(signal.SIGTERM)
            process.wait()
            raise
    return "done" if code == 0 else f"failed with {code}, see {path.name}"


def _python_path() -> str:
    return os.pathsep.join([str(ROOT), str(ROOT / "connector"), *filter(None, [os.environ.get("PYTHONPATH")])])


def _write_page(states: dict[str, str], out: Path) -> None:
    parts = ["# A run on a GPU\n"]
    for name, state in states.items():
        path = out / f"{name}.txt"
        text = path.read_text(errors="replace").strip() if path.exists() else ""
        parts.append(f"## {name}: {state}\n")
        parts += [f"```\n{text}\n```\n"] if text else []
    (out / "gpu.md").write_text("\n".join(parts))


def python(*arguments: str) -> list[str]:
    """Return the command line of this Python with arguments."""
    return [sys.executable, *arguments]


def pytest(*arguments: str) -> list[str]:
    """Return the command line of tests on a GPU machine.

    It may lack plugins that our settings name, and its torch may warn of what is no concern here.
    """
    lenient = ["-o", "addopts=--import-mode=importlib", "-o", "filterwarnings=default"]
    return python("-m", "pytest", "-q", *lenient, *arguments)
