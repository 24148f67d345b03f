"""The contract of a fuzz target, and what is counted of its inputs."""

import re
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

CORPUS = Path(__file__).parent / "corpus"
ACCEPTED = "accepted"
_VARIABLE = re.compile(r"'.*?'|\"[^\"]*\"|b'.*'|0x[0-9a-f]+|[0-9a-f]{8,}|[0-9]+|/[^ ]+", re.DOTALL)
SLOW_S = 5.0
"""Of this process's own time: an input that takes longer is a finding: sizes are bounded, so work has to be, too."""


class DaemonError(AssertionError):
    """The daemon answered what it never may, or no longer answers."""


class Target(Protocol):
    """Reads bytes that may be anything. It may refuse them, by an error of kvtier's own, and nothing else.

    Attributes:
        name: Of the folder of its corpus.
        words: Byte strings that mean something to it.
    """

    name: str
    words: Sequence[bytes]

    def seeds(self) -> Sequence[bytes]:
        """Return valid inputs, of which others are made."""

    def mend(self, data: bytes) -> bytes:
        """Make the checksums of a changed input right again, as far as they have a place; or return it as it is."""

    def read(self, data: bytes) -> str:
        """Read an input; return `ACCEPTED`, or why it was refused. Any exception is a finding."""

    def close(self) -> None:
        """Release what it holds."""


def reason(error: Exception) -> str:
    """Return a refusal without what differs from input to input: its class, and its message without values."""
    return f"{type(error).__name__}: {_VARIABLE.sub('*', str(error))[:100]}"


@dataclass
class Tally:
    """What became of the inputs of one target."""

    target: Target
    keep: Callable[[str, bytes], None]
    """Keeps an input that is a finding, by the name of what went wrong."""
    num_inputs: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    findings: dict[str, str] = field(default_factory=dict)
    slowest_s: float = 0.0

    def take(self, data: bytes) -> None:
        """Have the target read an input."""
        self.num_inputs += 1
        began_s = time.process_time()
        try:
            self.refusals[self.target.read(data)] += 1
        except Exception as exc:
            what = reason(exc) if isinstance(exc, DaemonError) else f"{type(exc).__name__} at {_place_of(exc)}"
            self._found(what, data, traceback.format_exc())
        took_s = time.process_time() - began_s
        self.slowest_s = max(self.slowest_s, took_s)
        if took_s > SLOW_S:
            self._found("slow", data, f"{took_s:.1f} s for {len(data)} bytes")

    def _found(self, what: str, data: bytes, text: str) -> None:
        if what not in self.findings:
            self.findings[what] = text[-3000:]
            self.keep(what, data)


def _place_of(error: Exception) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/kvtier/" in frame.filename]
    frame = frames[-1] if frames else traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"


def corpus_of(name: str) -> list[Path]:
    """Return the kept inputs of a target."""
    return sorted(path for path in (CORPUS / name).glob("*") if path.is_file())
