"""The text of a file that an operator names."""

import sys
from contextlib import nullcontext
from pathlib import Path

MAX_FILE_BYTES = 256 * 1024**2
STDIN = "-"


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
