"""The tables of `list`, `show`, `pin` and `status`; they fit 80 columns."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvtier._pb.cache_pb2 import DaemonStatus, NamespaceStatus, PromptBinding, PromptStatus, SessionStatus, TierStatus
from kvtier.cli.json_text import read_json
from kvtier.cli.output.durations import format_age, format_duration, format_expiry, format_moment
from kvtier.cli.output.grid import Cell, Grid, Part, Styled, column
from kvtier.cli.output.prompt_summary import Summary, state_meaning, state_name, summarize
from kvtier.config.units import format_size
from kvtier.printable import printable_json

_SHORT_ID = 12
_MODEL_CHARS = 22
_MIN_MODEL_CHARS = 12
_NUMBERS_WIDTH = 57
_PRIORITY_WIDTH = 5
_PREVIEW_CHARS = 300
_MENTIONED_BYTES = 1 << 20


def prompts_list(prompts: Sequence[PromptStatus], width: int) -> Sequence[Part]:
    """Return what `kvtier list` prints on a console with this many columns."""
    table = prompts_table(prompts, width)
    summaries = [summarize(status) for status in prompts]
    if not any(numbers.num_shared_chunks for numbers in summaries):
        return [table]
    disk_bytes = format_size(sum(numbers.disk_share_bytes for numbers in summaries))
    return [table, "", f"* shared with other prompts. Each chunk counted once: {disk_bytes} on disk."]


def prompts_table(prompts: Sequence[PromptStatus], width: int) -> Grid:
    """Return one row per prompt; an asterisk marks bytes that rows of other prompts count too."""
    has_priorities = any(status.priority for status in prompts)
    # Name and model get the width that the other columns leave.
    numbers_width = _NUMBERS_WIDTH + (_PRIORITY_WIDTH if has_priorities else 0)
    model_chars = max(_MIN_MODEL_CHARS, (width - numbers_width) // 2)
    priority_header = ["PRIO>"] if has_priorities else []
    table = _table(
        "NAME", "STATE", "PIN", *priority_header, "TOKENS>", "CHUNKS>", "HOST>", "DISK>", "MODEL", "AGE>", "ENDS>"
    )
    for status in prompts:
        numbers = summarize(status)
        table.row(
            status.name,
            state_name(status),
            "yes" if status.pinned else "no",
            *([str(status.priority)] if has_priorities else []),
            str(status.num_tokens) if status.num_tokens else "-",
            f"{numbers.num_durable_chunks}/{numbers.num_chunks}" if numbers.num_chunks else "-",
            str(numbers.num_host_chunks) if numbers.num_chunks else "-",
            _compact(numbers.disk_bytes) + ("*" if numbers.num_shared_chunks else ""),
            _short_model(status.model or "any", model_chars),
            format_age(status.created_unix_s),
            format_expiry(status.expires_unix_s) if status.pinned else "-",
        )
    return table


def prompt_details(status: PromptStatus) -> Sequence[Part]:
    """Return what `kvtier show` prints."""
    rows: dict[str, Cell] = {
        "name": status.name,
        "state": f"{state_name(status)}: {state_meaning(status)}",
        "pinned": _pinned(status),
        "priority": str(status.priority) if status.priority else "",
        "model": status.model or "any",
        "LoRA": status.lora_name,
        "cache salt": "set" if status.cache_salt else "",
        "tokens": _tokens(status),
        "created": format_moment(status.created_unix_s),
        "engines": f"{status.num_engines} attached, {status.num_confirmed} confirmed",
        "shared": _shared(summarize(status)),
        "error": status.error,
        "source": _source(status.recipe_json),
    }
    parts: list[Part] = [_pairs(rows)]
    return [*parts, "", bindings_table(status.bindings)] if status.bindings else parts


def bindings_table(bindings: Iterable[PromptBinding]) -> Grid:
    """Return one row per namespace of a prompt."""
    table = _table("NAMESPACE", "LIVE", "COVERED>", "HOST>", "ON DISK>", "RAW>", "STORED>", "RATIO>")
    for binding in bindings:
        table.row(
            binding.namespace_id[:_SHORT_ID],
            "yes" if binding.live else "no",
            str(binding.covered_tokens),
            f"{binding.num_host_chunks}/{binding.num_chunks}",
            f"{binding.num_durable_chunks}/{binding.num_chunks}",
            format_size(binding.raw_bytes),
            format_size(binding.disk_bytes),
            f"{binding.durable_raw_bytes / binding.disk_bytes:.2f}x" if binding.disk_bytes else "-",
        )
    return table


def pin_result(status: PromptStatus) -> Grid:
    """Return what `kvtier pin` prints at its end."""
    numbers = summarize(status)
    rows: dict[str, Cell] = {
        "state": f"{state_name(status)}: {state_meaning(status)}",
        "tokens": f"{status.num_tokens}, {numbers.covered_tokens} of them in whole chunks",
        "chunks": str(numbers.num_chunks),
        "bytes": _stored(numbers),
        "shared": _shared(numbers),
        "in host memory": f"{numbers.num_host_chunks}/{numbers.num_chunks} chunks",
        "on disk": f"{numbers.num_durable_chunks}/{numbers.num_chunks} chunks",
        "ends": format_expiry(status.expires_unix_s),
    }
    return _pairs(rows)


_STORE_MODES = {"pinned": "pinned prompts only", "all": "every prompt; what is not pinned is evictable"}


def daemon_details(status: DaemonStatus) -> Sequence[Part]:
    """Return what `kvtier status` prints."""
    rows: dict[str, Cell] = {
        "daemon": f"kvtier {status.version}, pid {status.pid}, up {_uptime(status.started_unix_s)}",
        "socket": status.socket,
        "stores": _STORE_MODES.get(status.store, status.store),
        "host": _tier(status.host),
        "disk": _tier(status.disk),
        "disk writes": _writes(status.counters),
        "prompts": _prompts(status),
        "metrics": f"NOT SERVED: {status.metrics_problem}" if status.metrics_problem else status.metrics_url,
    }
    parts: list[Part] = [_pairs(rows), "", *sessions_table(status.sessions)]
    if status.namespaces:
        parts += ["", namespaces_table(status.namespaces)]
    if counted := {name: status.counters[name] for name in sorted(status.counters) if status.counters[name]}:
        parts += ["", Styled("Events since the daemon started", "bold"), counters_table(counted)]
    return parts


def sessions_table(sessions: Iterable[SessionStatus]) -> Sequence[Part]:
    """Return one row per attached engine, or the way to attach one."""
    rows = list(sessions)
    if not rows:
        first, *others = HOW_TO_ATTACH
        return [f"No engine is attached. {first}", *others]
    table = _table("ENGINE", "PID>", "MODEL", "NAMESPACE", "UP>", "LEASES>", "CREDITS>")
    for row in rows:
        table.row(
            row.engine_id[:_SHORT_ID] + (" (lost)" if row.quarantined else ""),
            str(row.pid),
            _short_model(row.model_names[0] if row.model_names else "-"),
            row.namespace_id[:_SHORT_ID],
            format_age(row.attached_unix_s),
            str(row.num_leases),
            str(row.num_store_grants),
        )
    return [table]


HOW_TO_ATTACH = (
    "Start vLLM as this user, with kvtier installed beside it:",
    """  vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVTierConnector",""",
    """    "kv_connector_module_path": "kvtier_connector", "kv_role": "kv_both",""",
    """    "kv_load_failure_policy": "recompute"}'""",
)


def namespaces_table(namespaces: Iterable[NamespaceStatus]) -> Grid:
    """Return one row per namespace."""
    table = _table("NAMESPACE", "MODEL", "LIVE", "HOST>", "ON DISK>", "STORED>", "PER CHUNK>")
    for row in namespaces:
        table.row(
            row.namespace_id[:_SHORT_ID],
            _short_model(row.model or "-"),
            "yes" if row.live else "no",
            str(row.num_host_chunks),
            str(row.num_disk_chunks),
            format_size(row.disk_bytes),
            format_size(row.row_bytes),
        )
    return table


def counters_table(counters: dict[str, int]) -> Grid:
    """Return name and value of each counter."""
    table = Grid(column(wraps=True), column(right=True), gap=2)
    for name, value in counters.items():
        table.row(name, format_size(value) if "bytes" in name.split("_") else str(value))
    return table


def _table(*headers: str) -> Grid:
    """Return an empty table; a header that ends with > is that of a number."""
    return Grid(*(column(h.removesuffix(">"), right=h.endswith(">"), wraps=h == "NAME") for h in headers))


def _pairs(rows: Mapping[str, Cell]) -> Grid:
    table = Grid(column(style="bold"), column(wraps=True), gap=2)
    for name, value in rows.items():
        if value:
            table.row(name, value)
    return table


def _pinned(status: PromptStatus) -> str:
    if not status.pinned:
        return "no; `kvtier evict` drops its chunks"
    if not status.expires_unix_s:
        return "yes, until unpinned"
    return f"yes, until {format_moment(status.expires_unix_s)} (in {format_expiry(status.expires_unix_s)})"


def _tokens(status: PromptStatus) -> str:
    return f"{status.num_tokens} (digest {status.tokens_digest[:_SHORT_ID]})" if status.num_tokens else ""


def _stored(numbers: Summary) -> str:
    raw, on_disk = format_size(numbers.raw_bytes), format_size(numbers.disk_bytes)
    if not numbers.disk_bytes:
        return f"{raw} raw, nothing on disk yet"
    part = "" if numbers.complete else f"{format_size(numbers.durable_raw_bytes)} of them as "
    return f"{raw} raw, {part}{on_disk} on disk ({numbers.ratio:.2f}x smaller)"


def _shared(numbers: Summary) -> str:
    if not numbers.num_shared_chunks:
        return ""
    share, whole = format_size(numbers.disk_share_bytes), format_size(numbers.disk_bytes)
    return (
        f"{numbers.num_shared_chunks} of {numbers.num_chunks} chunks belong to other pinned prompts too; its share "
        f"of the {whole} on disk is {share}"
    )


def _source(recipe_json: str) -> Cell:
    """Return the kind of the recipe and its beginning; --json has all of it."""
    try:
        return _recipe_lines(read_json(recipe_json))
    except (ValueError, AttributeError, TypeError):
        return ""


def _recipe_lines(recipe: dict[str, Any]) -> Cell:
    content = recipe.get("content")
    text = content if isinstance(content, str) else printable_json(content) if content else ""
    parts = [f"{len(recipe['tools'])} tools"] if recipe.get("tools") else []
    if kwargs := recipe.get("chat_template_kwargs"):
        parts.append(f"chat_template_kwargs {printable_json(kwargs)}")
    given = f" with {', '.join(parts)}" if parts else ""
    kind = f"{recipe.get('kind', 'unknown')}{given}"
    # Line breaks of the text, folded again, would make a ragged column.
    shown = " ".join(text.split())
    if len(shown) > _PREVIEW_CHARS:
        shown = f"{shown[:_PREVIEW_CHARS]}… ({len(text)} characters)"
    return (kind, shown) if shown else kind


def _tier(tier: TierStatus) -> Cell:
    share = 100 * tier.used_bytes / tier.limit_bytes if tier.limit_bytes else 0
    used = f"{format_size(tier.used_bytes)} of {format_size(tier.limit_bytes)} ({share:.0f}%)"
    pinned = f", {format_size(tier.pinned_bytes)} pinned" if tier.used_bytes else ""
    state = f"{used}, {tier.num_chunks} chunks{pinned}, in {tier.location}"
    return (state, f"SWITCHED OFF: {tier.latched}") if tier.latched else state


def _prompts(status: DaemonStatus) -> str:
    is_much = status.prompt_bytes >= _MENTIONED_BYTES
    memory = f", {format_size(status.prompt_bytes)} of memory" if is_much else ""
    return f"{status.num_prompts}, {status.num_pinned} pinned{memory}"


def _writes(counters: Mapping[str, int]) -> str:
    """Return the cost of durability on the device since the daemon started; empty before the first pack."""
    num_packs, durable_bytes = counters.get("packs_written", 0), counters.get("durable_raw_bytes", 0)
    if not num_packs or not durable_bytes:
        return ""
    written_bytes = counters["pack_bytes_written"] + counters.get("compacted_bytes_written", 0)
    return (
        f"{format_size(written_bytes)} for {format_size(durable_bytes)} of chunks (write amplification "
        f"{written_bytes / durable_bytes:.2f}), {counters.get('pack_fsyncs', 0)} packs fsynced, "
        f"{counters.get('pack_write_ms', 0) / 1000 / num_packs:.2f} s a pack, "
        f"{format_size(counters.get('write_back_queue_bytes', 0))} waiting"
    )


def _uptime(started_unix_s: float) -> str:
    return format_duration(time.time() - started_unix_s)


def _compact(num_bytes: int) -> str:
    return format_size(num_bytes).replace("iB", "").replace(" ", "") if num_bytes else "-"


def _short_model(model: str, max_chars: int = _MODEL_CHARS) -> str:
    """Return the end of a long model name, where paths differ."""
    return model if len(model) <= max_chars else "…" + model[1 - max_chars :]
