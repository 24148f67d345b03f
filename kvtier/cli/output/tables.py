"""The tables of `list`, `show`, `pin` and `status`; they fit 80 columns."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvtier.cli.output.durations import format_age, format_duration, format_expiry, format_moment
from kvtier.cli.output.grid import Cell, Grid, Part, Styled, column
from kvtier.cli.output.prompt_states import state_meaning, state_name
from kvtier.config.units import format_size
from kvtier.library.values.prompt_summary import Summary, summarize
from kvtier.library.values.public_values import (
    Binding,
    DaemonStatus,
    EngineStatus,
    KeyUsage,
    Namespace,
    Prompt,
    PromptState,
    Tier,
)
from kvtier.printable import SHOWN_CHARS, printable_json

SHORT_ID = 12
"""Characters of a namespace's or an engine's id: enough to name it."""


def prompts_list(prompts: Sequence[Prompt], width: int, *, are_all: bool = False) -> Iterator[Part]:
    """Yield what `kvtier list` prints on a console with this many columns.

    An asterisk marks bytes that rows of other prompts count too. `are_all`: the daemon has no other prompts.
    """
    has_priorities = any(status.priority for status in prompts)
    summaries = [summarize(status) for status in prompts]
    # Name and model get the width that the other columns leave.
    numbers_width = (62 if has_priorities else 57) + 3 * any(status.public for status in prompts)
    model_chars = max(12, (width - numbers_width) // 2)
    priority_header = ["PRIO>"] if has_priorities else []
    table = _table(
        "NAME", "STATE", "PIN", *priority_header, "TOKENS>", "CHUNKS>", "HOST>", "DISK>", "MODEL", "AGE>", "ENDS>"
    )
    for status, numbers in zip(prompts, summaries, strict=True):
        on_disk = format_size(numbers.disk_bytes).replace("iB", "").replace(" ", "") if numbers.disk_bytes else "-"
        table.row(
            status.name,
            state_name(status),
            "public" if status.public else _yes(status.pinned),
            *([str(status.priority)] if has_priorities else []),
            str(status.num_tokens or "-"),
            f"{numbers.num_kept_chunks}/{numbers.num_chunks}" if numbers.num_chunks else "-",
            str(numbers.num_host_chunks) if numbers.num_chunks else "-",
            on_disk + ("*" if numbers.num_shared_chunks else ""),
            _short_model(status.model or "any", model_chars),
            format_age(status.created_unix_s),
            format_expiry(status.expires_unix_s) if status.pinned else "-",
        )
    yield table
    if (num_hits := sum(status.usage.num_hits for status in prompts)) > 0:
        tokens = sum(status.usage.restored_tokens for status in prompts)
        seconds = sum(status.usage.saved_prefill_s for status in prompts)
        hits = f"{num_hits:,} hit{'s' if num_hits > 1 else ''}"
        saved = f"kvtier restored {tokens:,} tokens, and saved {seconds:,.1f} s of prefill."
        yield from ("", f"{hits}: {saved if tokens else 'all that was needed was in vLLM itself.'}")
    if any(numbers.num_shared_chunks for numbers in summaries):
        rows = format_size(sum(numbers.disk_bytes for numbers in summaries))
        share = format_size(sum(numbers.disk_share_bytes for numbers in summaries))
        taken = f"On disk they take {share}." if are_all else f"Their share is {share}: a chunk of n prompts is 1/n."
        yield from ("", "* Other pinned prompts have some of its chunks too; each chunk is stored once.")
        yield f"DISK adds up to {rows}. {taken}"


def prompt_details(status: Prompt) -> Iterator[Part]:
    """Yield what `kvtier show` prints."""
    rows: dict[str, Cell] = {
        "name": status.name,
        "state": f"{state_name(status)}: {state_meaning(status)}",
        "pinned": _pinned(status),
        "origin": _ORIGINS.get(status.origin, ""),
        "replaced by": f"{status.replacement}, when it is durable" if status.replacement else "",
        "used": _used(status),
        "owner": status.owner,
        "labels": format_labels(status.labels),
        "priority": str(status.priority) if status.priority else "",
        "model": status.model or "any",
        "LoRA": status.lora_name,
        "cache salt": "set" if status.cache_salt else _any_salt(status),
        "tokens": f"{status.num_tokens} (digest {status.tokens_digest[:SHORT_ID]})" if status.num_tokens else "",
        "created": format_moment(status.created_unix_s),
        "engines": f"{status.num_engines} attached, {status.num_confirmed} confirmed",
        "shared": _shared(summarize(status)),
        "error": "" if status.state is PromptState.REFUSED else status.error,  # its state says it
        "source": _source(status.recipe),
    }
    yield _pairs(rows)
    if status.bindings:
        yield from ("", _bindings(status.bindings))


def _pinned(status: Prompt) -> str:
    if not status.pinned:
        return "no; `kvtier evict` drops its chunks"
    if not status.expires_unix_s:
        return "yes, until unpinned"
    again = f"; each use begins the {format_duration(status.ttl_s)} again" if status.sliding else ""
    return f"yes, until {format_moment(status.expires_unix_s)} (in {format_expiry(status.expires_unix_s)}){again}"


def format_labels(labels: Mapping[str, str]) -> str:
    """Return labels as they are written, by key."""
    return ", ".join(f"{key}={value}" for key, value in sorted(labels.items()))


_ORIGINS = {
    "replacement": "it takes the name before the @ when it is durable",
    "auto": "found in requests; `kvtier pin NAME --adopt` makes it a pin with a name",
    "request": "a request",
}


def _used(status: Prompt) -> Cell:
    """Return what requests had of a prompt, and what that saved."""
    usage, use, lines = status.usage, status.use, []
    if use.num_requests:
        saved = f"{use.saved_tokens:,} tokens, {use.saved_s:,.0f} s of prefill"
        lines.append(f"by {use.num_requests:,} requests, the last {format_age(use.last_used_unix_s)} ago; {saved}")
    if usage.num_hits:
        lines.append(f"{usage.num_hits:,} requests hit, the last {format_age(usage.last_hit_unix_s)} ago")
        lines.append(
            f"restored: {usage.restored_tokens:,} tokens ({usage.host_tokens:,} from host memory, "
            f"{usage.disk_tokens:,} from disk), {usage.saved_prefill_s:,.1f} s of prefill saved"
        )
        lines.append(f"from vLLM's prefix cache: {usage.device_tokens:,} tokens")
    if usage.others:
        others = sorted(usage.others, key=lambda each: -each.num_requests)
        lines.append("others: " + ", ".join(f"{each.num_requests:,} {each.outcome}" for each in others))
    return tuple(lines)


def _bindings(bindings: Iterable[Binding]) -> Grid:
    table = _table("NAMESPACE", "LIVE", "COVERED>", "HOST>", "ON DISK>", "RAW>", "STORED>", "RATIO>")
    for binding in bindings:
        table.row(
            binding.namespace_id[:SHORT_ID],
            _yes(binding.live),
            str(binding.covered_tokens),
            f"{binding.num_host_chunks}/{binding.num_chunks}",
            f"{binding.num_durable_chunks}/{binding.num_chunks}",
            format_size(binding.raw_bytes),
            format_size(binding.disk_bytes),
            f"{binding.durable_raw_bytes / binding.disk_bytes:.2f}x" if binding.disk_bytes else "-",
        )
    return table


def pin_result(status: Prompt) -> Grid:
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
        "cache salt": _any_salt(status),
        "ends": format_expiry(status.expires_unix_s),
    }
    return _pairs(rows)


def _any_salt(status: Prompt) -> str:
    return "any: the prompt is public" if status.public else ""


_STORE_MODES = {"pinned": "pinned prompts only", "all": "every prompt; what is not pinned is evictable"}


def daemon_details(status: DaemonStatus) -> Iterator[Part]:
    """Yield what `kvtier status` prints."""
    uptime = format_duration(time.time() - status.started_unix_s)
    memory = f", {format_size(status.prompt_bytes)} of memory" if status.prompt_bytes >= 1 << 20 else ""
    rows: dict[str, Cell] = {
        "daemon": f"kvtier {status.version}, pid {status.pid}, up {uptime}",
        "socket": status.socket,
        "stores": _STORE_MODES.get(status.store, status.store),
        "host": _tier(status.host),
        "disk": _tier(status.disk),
        "disk writes": _writes(status.counters),
        **{f"disk key {number}": _key(key) for number, key in enumerate(status.disk_keys, start=1)},
        "prompts": f"{status.num_prompts}, {status.num_pinned} pinned{memory}",
        "HTTP": f"NOT SERVED: {status.http_problem}" if status.http_problem else status.http_url,
    }
    yield from (_pairs(rows), "")
    if status.sessions:
        yield sessions_table(status.sessions)
    else:
        first, *others = HOW_TO_ATTACH
        yield from (f"No engine is attached. {first}", *others)
    if status.namespaces:
        yield from ("", _namespaces(status.namespaces))
    yield from quarantine_lines(status.namespaces)
    if counted := {name: number for name, number in sorted(status.counters.items()) if number}:
        table = Grid(column(wraps=True), column(right=True), gap=2)
        for name, number in counted.items():
            table.row(name, format_size(number) if "bytes" in name.split("_") else str(number))
        yield from ("", Styled("Events since the daemon started", "bold"), table)


def _key(key: KeyUsage) -> str:
    """Return what `kvtier status` says of a key."""
    packs = f"{key.num_packs} pack{'s' * (key.num_packs != 1)}"
    what = f"{format_size(key.num_bytes)} in {packs}" if key.num_packs else "nothing"
    note = " (MISSING in disk.key_file)" if key.is_missing else " (writes)" if key.writes else ""
    return f"{key.name or 'plain'}{note}: {what}"


HOW_TO_ATTACH = (
    "Start vLLM as this user, with kvtier installed beside it:",
    """  vllm serve MODEL --enable-prompt-tokens-details --kv-transfer-config '{""",
    """    "kv_connector": "KVTierConnector",""",
    """    "kv_connector_module_path": "kvtier_connector", "kv_role": "kv_both",""",
    """    "kv_load_failure_policy": "recompute",""",
    """    "kv_connector_extra_config": {"warm_url": "auto"}}'""",
)


def sessions_table(sessions: Iterable[EngineStatus]) -> Grid:
    """Return a row for each attached engine."""
    table = _table("ENGINE", "PID>", "MODEL", "NAMESPACE", "UP>", "LEASES>", "CREDITS>")
    for session in sessions:
        table.row(
            session.engine_id[:SHORT_ID] + (" (lost)" if session.quarantined else ""),
            str(session.pid),
            _short_model(session.model_names[0] if session.model_names else "-"),
            session.namespace_id[:SHORT_ID],
            format_age(session.attached_unix_s),
            str(session.num_leases),
            str(session.num_store_grants),
        )
    return table


def _namespaces(namespaces: Iterable[Namespace]) -> Grid:
    table = _table("NAMESPACE", "MODEL", "LIVE", "HOST>", "ON DISK>", "STORED>", "PER CHUNK>")
    for namespace in namespaces:
        table.row(
            namespace.namespace_id[:SHORT_ID],
            _short_model(namespace.model or "-"),
            "yes" if namespace.live else f"no, {format_age(namespace.seen_unix_s)}",
            str(namespace.num_host_chunks),
            str(namespace.num_disk_chunks),
            format_size(namespace.disk_bytes),
            format_size(namespace.row_bytes),
        )
    return table


def quarantine_lines(namespaces: Iterable[Namespace]) -> Iterator[Styled]:
    """Yield for each quarantined namespace that it is, why, and the way out."""
    for each in namespaces:
        if each.quarantine_reason:
            short_id, since = each.namespace_id[:SHORT_ID], format_moment(each.quarantined_unix_s)
            what = (
                f"QUARANTINED since {since}: namespace {short_id} serves and stores nothing: {each.quarantine_reason}"
            )
            yield Styled(what, "bold red")
            yield Styled(f"-> kvtier quarantine {short_id} --release serves it again")


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _table(*headers: str) -> Grid:
    """Return an empty table; a header that ends with > is that of a number."""
    return Grid(*(column(h.removesuffix(">"), right=h.endswith(">"), wraps=h == "NAME") for h in headers))


def _pairs(rows: Mapping[str, Cell]) -> Grid:
    table = Grid(column(style="bold"), column(wraps=True), gap=2)
    for name, value in rows.items():
        if value:
            table.row(name, value)
    return table


def _stored(numbers: Summary) -> str:
    raw, on_disk = format_size(numbers.raw_bytes), format_size(numbers.disk_bytes)
    if not numbers.disk_bytes:
        return f"{raw} raw, nothing on disk yet"
    part = "" if numbers.complete else f"{format_size(numbers.durable_raw_bytes)} of them as "
    return f"{raw} raw, {part}{on_disk} on disk ({numbers.durable_raw_bytes / numbers.disk_bytes:.2f}x smaller)"


def _shared(numbers: Summary) -> str:
    if not numbers.num_shared_chunks:
        return ""
    share, whole = format_size(numbers.disk_share_bytes), format_size(numbers.disk_bytes)
    return (
        f"{numbers.num_shared_chunks} of {numbers.num_chunks} chunks belong to other pinned prompts too; its share "
        f"of the {whole} on disk is {share}"
    )


def _source(recipe: Any) -> Cell:
    """Return the kind of the recipe and its beginning; --json has all of it."""
    try:
        content, tools, kwargs = (recipe.get(field) for field in ("content", "tools", "chat_template_kwargs"))
        text = content if isinstance(content, str) else printable_json(content) if content else ""
        parts = [f"{len(tools)} tools"] if tools else []
    except (AttributeError, TypeError):
        return ""
    parts += [f"chat_template_kwargs {printable_json(kwargs)}"] if kwargs else []
    kind = " with ".join([str(recipe.get("kind", "unknown")), *([", ".join(parts)] if parts else [])])
    # Line breaks of the text, folded again, would make a ragged column.
    shown = " ".join(text.split())
    if len(shown) > SHOWN_CHARS:
        shown = f"{shown[:SHOWN_CHARS]}… ({len(text)} characters)"
    return (kind, shown) if shown else kind


def _tier(tier: Tier) -> Cell:
    share = 100 * tier.used_bytes / tier.limit_bytes if tier.limit_bytes else 0
    used = f"{format_size(tier.used_bytes)} of {format_size(tier.limit_bytes)} ({share:.0f}%)"
    pinned = f", {format_size(tier.pinned_bytes)} pinned" if tier.used_bytes else ""
    state = f"{used}, {tier.num_chunks} chunks{pinned}, in {tier.location}"
    return (state, f"SWITCHED OFF: {tier.breaker_open_reason}") if tier.breaker_open_reason else state


def _writes(counters: Mapping[str, int]) -> str:
    """Return the cost of durability on the device since the daemon started; empty before the first pack."""
    num_packs, durable_bytes = counters.get("packs_written", 0), counters.get("written_back_bytes", 0)
    if not num_packs or not durable_bytes:
        return ""
    written_bytes = counters["disk_written_bytes_write_back"] + counters.get("disk_written_bytes_compaction", 0)
    return (
        f"{format_size(written_bytes)} for {format_size(durable_bytes)} of chunks (write amplification "
        f"{written_bytes / durable_bytes:.2f}), {counters.get('pack_fsyncs', 0)} packs fsynced, "
        f"{counters.get('pack_write_ms', 0) / 1000 / num_packs:.2f} s a pack, "
        f"{format_size(counters.get('write_back_queue_bytes', 0))} waiting"
    )


def _short_model(model: str, max_chars: int = 22) -> str:
    """Return the end of a long model name, where paths differ."""
    return model if len(model) <= max_chars else "…" + model[1 - max_chars :]
