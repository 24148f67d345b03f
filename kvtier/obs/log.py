"""Log lines: an event's name and fields, as text or JSON, on stderr.

One event per transition, never per chunk, and of bounded length. No line holds the tokens or the text of a prompt, a
cache salt or a credential: the value of a field with such a name is withheld here.

When stderr is connected to the systemd journal, every line begins with its priority, which the journal removes and
keeps beside the line (`journalctl -p warning`). Text has no time then, because the journal has it.
Source: sd-daemon(3), systemd.exec(5).
"""

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import TextIO

from kvtier.printable import printable, printable_json, shortened

_WITHHELD = frozenset(
    {"tokens", "token_ids", "text", "messages", "content", "recipe", "recipe_json", "cache_salt", "api_key"}
)
_ATTRIBUTE = "kvtier_fields"
_MAX_TRACEBACK_BYTES = 16 * 1024
_JOURNAL_VARIABLE = "JOURNAL_STREAM"
# syslog(3): LOG_CRIT, LOG_ERR, LOG_WARNING, LOG_INFO, LOG_DEBUG.
_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_DEBUG_PRIORITY = 7


def log_event(logger: logging.Logger, event: str, /, *, level: int = logging.INFO, **fields: object) -> None:
    """Log an event.

    Args:
        logger: The module's logger.
        event: What happened, in snake_case and the past tense or as a state: `pin_registered`, `ready`.
        level: One of logging's.
        fields: Bounded facts: names, counts, bytes, seconds, ids.
    """
    if logger.isEnabledFor(level):
        shown = {name: "<withheld>" if name in _WITHHELD else value for name, value in fields.items()}
        logger.log(level, event, extra={_ATTRIBUTE: shown}, stacklevel=2)


def setup_logging(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Send everything under the logger `kvtier` to stderr, and warnings of libraries too.

    Args:
        level: debug, info, warning or error.
        log_format: text or json.
        stream: Instead of stderr.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    in_journal = _is_journal(handler.stream)
    lines = JsonFormatter() if log_format == "json" else TextFormatter(with_time=not in_journal)
    handler.setFormatter(JournalFormatter(lines) if in_journal else lines)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("kvtier").setLevel(level.upper())


class TextFormatter(logging.Formatter):
    """`2026-11-21T09:30:00.123Z INFO kvtier.daemon.lifecycle ready pid=1`; values with spaces are JSON strings."""

    def __init__(self, *, with_time: bool = True) -> None:
        super().__init__()
        self._with_time = with_time

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        time = f"{_time(record)} " if self._with_time else ""
        head = f"{time}{record.levelname} {record.name} {printable(shortened(record.getMessage()))}"
        line = " ".join([head, *(f"{name}={_text(value)}" for name, value in _fields(record).items())])
        return "\n".join([line, *map(printable, _traceback(self, record).splitlines())])


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, event, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        head = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": shortened(record.getMessage()),
        }
        tail = {"exception": _traceback(self, record)} if record.exc_info else {}
        # The head wins: a field named "event" must not replace the name of the event.
        return json.dumps({**_fields(record), **head, **tail}, default=str)


class JournalFormatter(logging.Formatter):
    """Another formatter's lines, each after its priority: the journal makes an entry of every line of a traceback."""

    def __init__(self, lines: logging.Formatter) -> None:
        super().__init__()
        self._lines = lines

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines."""
        prefix = f"<{_priority(record.levelno)}>"
        return "\n".join(prefix + line for line in self._lines.format(record).splitlines())


def _priority(level: int) -> int:
    return next((priority for least, priority in _PRIORITIES if level >= least), _DEBUG_PRIORITY)


def _is_journal(stream: TextIO) -> bool:
    """Return whether systemd connected the stream to its journal, whose device and inode the variable holds."""
    try:
        target = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get(_JOURNAL_VARIABLE) == f"{target.st_dev}:{target.st_ino}"


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = getattr(record, _ATTRIBUTE, {})
    return {name: _bounded(value) for name, value in fields.items()}


def _bounded(value: object) -> object:
    if isinstance(value, bool | int | float | None):
        return value
    text = str(value)
    short = shortened(text)
    return value if short == text else short


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return shortened(formatter.formatException(record.exc_info), _MAX_TRACEBACK_BYTES) if record.exc_info else ""


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, tz=UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{int(record.msecs):03d}Z"


def _text(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    plain = text and text.isprintable() and not any(c in text for c in ' "=')
    return text if plain else printable_json(text)
