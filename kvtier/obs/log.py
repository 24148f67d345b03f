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
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TextIO

from kvtier.printable import printable, printable_json, shortened

EventSink = Callable[[str, int, float, Mapping[str, object]], None]
"""Gets each event: name, level, unix time, bounded fields. Called in the thread that logs; never blocks."""
_sinks: tuple[EventSink, ...] = ()  # replaced, never changed: any thread reads it

_WITHHELD = frozenset(
    {"tokens", "token_ids", "text", "messages", "content", "recipe", "recipe_json", "cache_salt", "api_key"}
)
_sinks_lock = threading.Lock()
_ATTRIBUTE = "kvtier_fields"
_PRIORITIES = {logging.CRITICAL: 2, logging.ERROR: 3, logging.WARNING: 4, logging.INFO: 6, logging.DEBUG: 7}
"""LOG_CRIT, LOG_ERR, LOG_WARNING, LOG_INFO and LOG_DEBUG of syslog(3)."""


def log_event(logger: logging.Logger, event: str, /, *, level: int = logging.INFO, **fields: object) -> None:
    """Log an event.

    Args:
        logger: The module's logger.
        event: What happened, in snake_case and the past tense or as a state: `pin_registered`, `ready`.
        level: One of logging's.
        fields: Bounded facts: names, counts, bytes, seconds, ids.
    """
    is_logged, sinks = logger.isEnabledFor(level), _sinks if level >= logging.INFO else ()
    if not is_logged and not sinks:
        return
    shown = {name: "<withheld>" if name in _WITHHELD else value for name, value in fields.items()}
    if is_logged:
        logger.log(level, event, extra={_ATTRIBUTE: shown}, stacklevel=2)
    for sink in sinks:
        sink(event, level, time.time(), {name: _bounded(value) for name, value in shown.items()})


class LastProblem:
    """What a caller that tries again and again has logged, so that a problem that lasts is one line."""

    def __init__(self) -> None:
        self._logged = ""

    def becomes(self, problem: str) -> bool:
        """Return whether to log a problem: it is not that of the last try. Empty: there was none."""
        is_new, self._logged = problem not in ("", self._logged), problem
        return is_new


@contextmanager
def events_to(sink: EventSink) -> Iterator[None]:
    """Have a sink get every event from INFO up during the block, whatever level is logged."""
    global _sinks
    with _sinks_lock:
        _sinks = (*_sinks, sink)
    try:
        yield
    finally:
        with _sinks_lock:
            _sinks = tuple(each for each in _sinks if each is not sink)


def setup_logging(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Send everything under the logger `kvtier` to stderr, and warnings of libraries too.

    `log_format`: text or json. `stream`: instead of stderr.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_EventFormatter(as_json=log_format == "json", in_journal=_is_journal(handler.stream)))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("kvtier").setLevel(level.upper())


class _EventFormatter(logging.Formatter):
    """Text or JSON, with a priority before each line in the journal, which makes an entry of every line."""

    def __init__(self, *, as_json: bool, in_journal: bool) -> None:
        super().__init__()
        self._as_json, self._in_journal = as_json, in_journal

    def format(self, record: logging.LogRecord) -> str:
        shown = self._json(record) if self._as_json else self._text(record)
        if not self._in_journal:
            return shown
        prefix = f"<{_PRIORITIES.get(record.levelno, 6)}>"
        return "\n".join(prefix + line for line in shown.splitlines())

    def _text(self, record: logging.LogRecord) -> str:
        """`2026-11-21T09:30:00.123Z INFO kvtier.daemon.lifecycle ready pid=1`; values with spaces are JSON strings."""
        moment = "" if self._in_journal else f"{_time(record)} "
        head = f"{moment}{record.levelname} {record.name} {printable(shortened(record.getMessage()))}"
        line = " ".join([head, *(f"{name}={_text(value)}" for name, value in _fields(record).items())])
        return "\n".join([line, *map(printable, self._traceback(record).splitlines())])

    def _json(self, record: logging.LogRecord) -> str:
        """One object: the fields, which do not replace time, level, logger and event; a traceback in `exception`."""
        head = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": shortened(record.getMessage()),
        }
        tail = {"exception": self._traceback(record)} if record.exc_info else {}
        return json.dumps({**_fields(record), **head, **tail}, default=str)

    def _traceback(self, record: logging.LogRecord) -> str:
        return shortened(self.formatException(record.exc_info), 16 * 1024) if record.exc_info else ""


def _is_journal(stream: TextIO) -> bool:
    """Return whether systemd connected the stream to its journal, whose device and inode the variable holds."""
    try:
        target = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{target.st_dev}:{target.st_ino}"


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = getattr(record, _ATTRIBUTE, {})
    return {name: _bounded(value) for name, value in fields.items()}


def _bounded(value: object) -> object:
    if isinstance(value, bool | int | float | None):
        return value
    text = str(value)
    short = shortened(text)
    return value if short == text else short


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, tz=UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{int(record.msecs):03d}Z"


def _text(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    plain = text and text.isprintable() and not any(c in text for c in ' "=')
    return text if plain else printable_json(text)
