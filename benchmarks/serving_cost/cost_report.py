"""The results of `benchmarks.serving_cost`, in Markdown."""

from collections.abc import Iterable, Sequence

from benchmarks.measuring.intervals import median_interval
from benchmarks.measuring.machine import spread
from benchmarks.measuring.samples import Records, Row
from benchmarks.measuring.tables import table

ALONE, KVTIER, CONTROL, PEER = "vLLM alone", "with kvtier", "vLLM alone, again", "vLLM fs tier"
BARE = "with a connector that does nothing"
MIB = 2**20
ROWS: tuple[tuple[str, str, int], ...] = (
    ("throughput, requests/s", "request_throughput", 3),
    ("throughput, output tokens/s", "output_throughput", 1),
    ("TTFT ms, median", "median_ttft_ms", 1),
    ("TTFT ms, 99th percentile", "p99_ttft_ms", 1),
    ("TPOT ms, median", "median_tpot_ms", 2),
    ("ITL ms, median", "median_itl_ms", 2),
    ("ITL ms, 99th percentile", "p99_itl_ms", 2),
    ("CPU seconds of EngineCore: scheduler", "EngineCore_cpu_s", 2),
    ("CPU seconds of Worker: model, copies", "Worker_cpu_s", 2),
    ("CPU seconds of all of vLLM's processes", "engine_cpu_s", 2),
)
_DAEMON_ROWS: tuple[tuple[str, str, int], ...] = (
    ("CPU seconds of the daemon", "daemon_cpu_s", 3),
    ("MiB stored", "stored_mib", 1),
    ("tokens from kvtier", "hit_tokens", 0),
)


def report(records: Records) -> str:
    """Return all tables."""
    setup = records.setup
    title = (
        f"{setup['hardware']}, {setup['versions']}.\n\n"
        f"{setup['requests']} requests of {setup['input_tokens']} + {setup['output_tokens']} tokens "
        f"(+-{setup.get('spread', 0.0):.0%}), "
        f"{setup['concurrency']} at a time, {setup['dtype']}; "
        f"{setup['pins']:,} durable pins of {setup['pin_tokens']} tokens that none matches; the daemon stores "
        f"{setup['store']}."
    )
    runs = list(records.rows("run"))
    parts = [title, _ratios(runs), _presence(records)]
    return "\n\n".join(part for part in parts if part)


def _ratios(runs: Sequence[Row]) -> str:
    """Return a row per quantity: both sides, and the median of the ratios within pairs."""
    if not runs:
        return ""
    compared = [side for side in (KVTIER, BARE, CONTROL, PEER) if any(run["side"] == side for run in runs)]
    shown = [side for side in (ALONE, *compared) if side not in (CONTROL, BARE)]
    rows = [
        (
            label,
            *(spread(_values(runs, side, key), digits=digits) for side in shown),
            *(median_interval(_paired(runs, side, key)).percent() for side in compared),
        )
        for label, key, digits in ROWS
    ]
    for label, key, digits in _DAEMON_ROWS:
        values = spread(_values(runs, KVTIER, key), digits=digits)
        rows.append((label, "", values, *[""] * (len(shown) + len(compared) - 2)))
    header = ("quantity", *shown, *(f"{side} / alone" for side in compared))
    interval = median_interval(_paired(runs, KVTIER, ROWS[0][1]))
    note = (
        f"Each side: median (min..max) of {interval.num_values} runs. Ratios: median within pairs of runs with the "
        f"same prompts, and its exact interval of {100 * interval.coverage:.1f} % (sign test)."
    )
    return f"{table(header, rows)}\n\n{note}"


def _values(runs: Iterable[Row], side: str, key: str) -> list[float]:
    return [run[key] for run in runs if run["side"] == side]


def _paired(runs: Sequence[Row], side: str, key: str) -> list[float]:
    alone = {(run["start"], run["pair"]): run[key] for run in runs if run["side"] == ALONE}
    return [run[key] / alone[run["start"], run["pair"]] for run in runs if run["side"] == side]


def _presence(records: Records) -> str:
    daemon = table(
        ("daemon", "CPU, ms per s", *_MEMORY),
        ((row["state"], f"{1e3 * row['cpu_ratio']:.2f}", *_memory(row)) for row in records.rows("daemon")),
    )
    engine = table(
        ("vLLM's process", "side", "when", *_MEMORY),
        ((row["process"], row["side"], row["state"], *_memory(row)) for row in records.rows("engine")),
    )
    bound = [
        f"{row['pins']:,} new pins were bound by an engine {row['bound_s']:.1f} s after the daemon's start; with their "
        f"chunks on disk it knew them to be durable after {row['durable_s']:.1f} s."
        for row in records.rows("bound")
    ]
    return "\n\n".join(part for part in (daemon, engine, *bound) if part)


_MEMORY = ("resident MiB", "proportional MiB", "of it allocated MiB", "of it shared memory MiB")


def _memory(row: Row) -> tuple[str, ...]:
    return tuple(f"{row[key] / MIB:.1f}" for key in ("resident", "proportional", "anonymous", "shared_memory"))
