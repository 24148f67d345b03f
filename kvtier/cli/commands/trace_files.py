"""`kvtier trace`: summarizes the files of a trace folder as a table, or merges them for a trace viewer."""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from kvtier.cli.options import AsJson
from kvtier.cli.output.grid import Grid, column
from kvtier.cli.output.streams import Output
from kvtier.errors import InvalidArgumentError
from kvtier.json_text import MAX_DEPTH
from kvtier.obs.trace import SUFFIX

Event = dict[str, Any]
_VIEWER = "open it at https://ui.perfetto.dev (the file stays on your machine), or at chrome://tracing"


def trace(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder that trace.folder names", show_default=False)
    ],
    merge: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all spans into one file", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how daemon, engines and workers spent their time.

    They write spans while trace.folder is set (KVTIER_TRACE_FOLDER=DIR, for kvtier-daemon and for vLLM).
    """
    try:
        files = sorted(folder.glob(f"*{SUFFIX}"))
    except OSError as exc:  # a name that is too long for any file
        raise InvalidArgumentError("FOLDER", str(folder), f"cannot be read: {exc.strerror}") from exc
    if not files:
        raise InvalidArgumentError(
            "FOLDER",
            str(folder),
            f"holds no traces (*{SUFFIX}); start kvtier-daemon and vLLM with KVTIER_TRACE_FOLDER={folder}",
        )
    try:
        events = [event for path in files for event in read_trace(path)]
    except OSError as exc:
        raise InvalidArgumentError("FOLDER", str(folder), f"{exc.filename} cannot be read: {exc.strerror}") from exc
    output = Output(json=as_json)
    stages = summarize(events)
    output.answer(stages, _table(stages))
    if merge is not None:
        try:
            merge.write_text(json.dumps({"traceEvents": events}, separators=(",", ":")), encoding="utf-8")
        except OSError as exc:
            raise InvalidArgumentError("--merge", str(merge), f"cannot be written: {exc.strerror}") from exc
        output.say(f"{len(events)} events of {len(files)} processes in {merge}: {_VIEWER}")


def read_trace(path: Path) -> Iterator[Event]:
    """Yield the events of a file; skip other lines, such as an incomplete last line of a killed process."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            # Events have about five. Python's parser fails on thousands of nested ones; `read_json` takes four times as
            # long.
            if line.count("[") + line.count("{") > MAX_DEPTH:
                continue
            try:
                event = json.loads(line.strip().rstrip(","))
            except ValueError:
                continue
            if isinstance(event, dict) and _is_event(event):
                yield event


def _is_event(event: Event) -> bool:
    """Return whether an event has the fields that its phase needs, with valid types."""
    numbers = {"X": ("ts", "dur"), "b": ("ts",), "e": ("ts",)}.get(str(event.get("ph")), ())
    names = (event.get("pid"), event.get("id"))
    return (
        isinstance(event.get("name", ""), str)
        and all(isinstance(name, int | str | None) for name in names)
        and all(isinstance(event.get(number), int | float) and abs(event[number]) < 1e15 for number in numbers)
    )


class StageSpan(NamedTuple):
    """One run of a stage, in microseconds of the machine's monotonic clock."""

    pid: Any
    stage: str
    began_us: float
    ended_us: float


def spans_of(events: Iterable[Event]) -> Iterator[StageSpan]:
    """Yield the spans that have ended."""
    begun: dict[tuple[Any, ...], float] = {}
    for event in events:
        pid, name, phase = event.get("pid"), event.get("name", ""), event.get("ph")
        track = (pid, name, event.get("id"))
        if phase == "X":
            yield StageSpan(pid, name, event["ts"], event["ts"] + event["dur"])
        elif phase == "b":
            begun[track] = event["ts"]
        elif phase == "e" and track in begun:
            yield StageSpan(pid, name, begun.pop(track), event["ts"])


def summarize(events: list[Event]) -> list[dict[str, Any]]:
    """Return a row for each process and stage, the largest total first; times in milliseconds."""
    processes = {}
    for event in events:
        args = event.get("args")
        if event.get("name") == "process_name" and isinstance(args, dict) and args.get("name"):
            processes[event.get("pid")] = str(args["name"])
    durations_ms: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for span in spans_of(events):
        process = processes.get(span.pid, str(span.pid))
        durations_ms[process, span.stage].append((span.ended_us - span.began_us) / 1000)
    rows = [
        {
            "process": process,
            "stage": stage,
            "count": len(values),
            "median_ms": round(statistics.median(values), 3),
            "p95_ms": round(sorted(values)[math.ceil(0.95 * len(values)) - 1], 3),
            "max_ms": round(max(values), 3),
            "total_ms": round(sum(values), 3),
        }
        for (process, stage), values in durations_ms.items()
    ]
    return sorted(rows, key=lambda row: (row["process"], -row["total_ms"]))


def _table(stages: list[dict[str, Any]]) -> Grid:
    names = (column(title, wraps=True) for title in ("PROCESS", "STAGE"))
    numbers = ("COUNT", "MEDIAN ms", "P95 ms", "MAX ms", "TOTAL ms")
    table = Grid(*names, *(column(title, right=True, wraps=True) for title in numbers))
    for row in stages:
        times = [f"{row[name]:.2f}" for name in ("median_ms", "p95_ms", "max_ms", "total_ms")]
        table.row(row["process"], row["stage"], str(row["count"]), *times)
    return table
