"""`kvtier verify`: are prompts what was stored, and does vLLM answer with them as without kvtier?"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.cli.commands.whole_files import write_whole
from kvtier.cli.context import connect, interruptible
from kvtier.cli.options import (
    DEFAULT_URL,
    AsJsonWithProgress,
    PromptNames,
    Selectors,
    api_key_option,
    seconds,
    url_option,
)
from kvtier.cli.output.grid import Grid, Part, Styled, column
from kvtier.cli.output.streams import Output
from kvtier.cli.output.tables import SHORT_ID, quarantine_lines
from kvtier.config.units import format_size
from kvtier.errors import InvalidArgumentError, PromptNotBoundError, PromptNotFoundError, PromptUnrenderedError
from kvtier.library.client import Client
from kvtier.library.values.proof_values import VerifiedNamespace, VerifyResult
from kvtier.library.values.public_values import PromptState
from kvtier.printable import cut, printable_json
from kvtier.process import ExitCode
from kvtier.verification import Comparison, ComparisonVerdict

_GOOD, _BAD, _OPEN = Styled("ok", "green"), "bold red", "yellow"


def verify(
    context: typer.Context,
    names: PromptNames = None,
    selector: Selectors = None,
    every: Annotated[bool, typer.Option("--all", help="All pinned prompts")] = False,
    no_live: Annotated[bool, typer.Option("--no-live", help="Compare bytes with checksums only; ask no vLLM")] = False,
    url: Annotated[str, url_option()] = DEFAULT_URL,
    api_key: Annotated[str | None, api_key_option()] = None,
    timeout: Annotated[float, seconds("Time for one answer of vLLM", 1)] = 600.0,
    no_quarantine: Annotated[
        bool, typer.Option("--no-quarantine", help="Leave a namespace alone whose KV differs from vLLM's")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail too if something could not be compared, or is not stored")
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the results to this file too, as JSON", show_default=False),
    ] = None,
    as_json: AsJsonWithProgress = False,
) -> None:
    """Verify prompts: their bytes beside their checksums, and vLLM's answers with them beside its own.

    The first finds bytes that changed since they were stored; such chunks are dropped, and stored again when next
    computed. The second finds KV that was wrong before: vLLM answers once with KV from kvtier and once with its own.
    Where the answers differ, the namespace is quarantined: it serves nothing until it is released.

    Exit codes: 0 nothing is damaged or different, 1 something is, or nothing was compared: of a prompt that was named,
    or of any.
    """
    if [bool(names), bool(selector), every].count(True) != 1:
        raise typer.BadParameter("give names of prompts, or -l LABELS, or --all", param_hint="NAME")
    output = Output(json=as_json)
    results: list[VerifyResult] = []
    quarantined: dict[str, str] = {}
    skipped: list[str] = []
    with (
        connect(context, url, api_key) as client,
        interruptible(output, "the prompts above were verified, and there is no report"),
    ):
        for name in _chosen(client, names, selector):
            try:
                with output.working(f"verifying {name} ..."):
                    result = client.verify(name, live=not no_live, timeout_s=timeout)
            except (PromptNotBoundError, PromptNotFoundError, PromptUnrenderedError) as exc:
                skipped.append(name)
                output.warn(f"{name}: not verified: {_why_not(client, name) or exc}")
                continue
            if result.empty:
                output.warn(f"{name}: nothing was compared: no chunk of it is stored; `kvtier warm {name}` computes it")
            results.append(result)
            output.say(*_lines(result))
            # At once, though nothing more of this namespace can be compared then: it serves wrong KV.
            if result.different and not no_quarantine:
                quarantined[name] = _quarantine(client, result, output)
    values = [result.to_dict() | {"quarantined_namespace_id": quarantined.get(result.name, "")} for result in results]
    output.answer(values, *_summary(results, skipped))
    if report is not None:  # last: where it cannot be written, the results are not lost
        _write_report(report, values)
    is_bad = any(each.damaged or each.different for each in results)
    is_open = bool(skipped) or not all(each.conclusive for each in results)
    num_asked, num_empty = len(skipped) + len(results), len(skipped) + sum(each.empty for each in results)
    # Each that was named has to be compared. With --all, a daemon without pins has nothing to compare.
    is_empty = num_empty > 0 if names else num_empty == num_asked and (num_asked > 0 or not every)
    if is_open and not is_empty:
        output.warn("not everything could be compared; --strict makes this a failure")
    if is_bad or is_empty or (strict and is_open):
        raise typer.Exit(ExitCode.FAILED)


def _chosen(client: Client, names: list[str] | None, selector: list[str] | None) -> list[str]:
    if names:
        return [client.get(name).name for name in dict.fromkeys(names)]  # a mistake ends it before anything is read
    return [prompt.name for prompt in client.list(selector=",".join(selector or ())) if prompt.pinned]


def _why_not(client: Client, name: str) -> str:
    """Say why a prompt that no engine has recognized cannot be verified; empty: the daemon's error says it."""
    try:
        prompt = client.get(name)
    except PromptNotFoundError:
        return ""
    if prompt.state is PromptState.REFUSED:
        return f"vLLM cannot use it: {prompt.error}"
    return str(PromptUnrenderedError(name)) if prompt.state is PromptState.UNRENDERED else ""


def _quarantine(client: Client, result: VerifyResult, output: Output) -> str:
    """Quarantine the namespace of a prompt that differs; return its id, empty where it is not known which it is."""
    assert result.live is not None
    if len(result.live_namespace_ids) != 1:
        ids = ", ".join(each[:SHORT_ID] for each in result.live_namespace_ids)
        output.fail(
            f"NOT quarantined: engines of several namespaces ({ids}) serve {result.model}, and it is not known which "
            "of them answered; stop the right one with: kvtier quarantine NAMESPACE --reason TEXT"
        )
        return ""
    reason = f"kvtier verify: {result.name} differs from vLLM's own answer: {cut(result.live.why)}"
    namespace = client.quarantine(result.live_namespace_ids[0], reason)
    output.say(*quarantine_lines([namespace]))
    return namespace.namespace_id


def _write_report(path: Path, values: list[dict[str, Any]]) -> None:
    try:
        write_whole(path, (printable_json(values, indent=2) + "\n").encode())
    except (OSError, ValueError) as exc:  # the latter: a path without a file's name
        raise InvalidArgumentError("--report", str(path), f"cannot be written: {_reason(exc)}") from exc


def _reason(exc: OSError | ValueError) -> str:
    return f"{exc.strerror}" if isinstance(exc, OSError) else "it has no name of a file"


def _lines(result: VerifyResult) -> Iterator[Part]:
    """Yield what was compared of a prompt, under which oracle, and with which outcome."""
    yield Styled(result.name, "bold")
    table = Grid(column(), column(), column(wraps=True), gap=2)
    for namespace in result.checksums.namespaces:
        outcome = Styled("DAMAGED", _BAD) if namespace.num_bad_chunks else _GOOD
        if outcome is _GOOD and namespace.num_lost_chunks:
            is_part = namespace.num_lost_chunks < namespace.num_chunks
            outcome = Styled("not whole" if is_part else "not stored", _OPEN)
        table.row("  checksums", outcome, _bytes_compared(namespace))
    if result.live is None:
        table.row("  live vLLM", Styled("not asked", "dim"), "")
    else:
        table.row("  live vLLM", _OUTCOMES[result.live.verdict], _live_compared(result, result.live))
    yield table


_OUTCOMES = {
    ComparisonVerdict.EQUAL: Styled("ok", "green"),
    ComparisonVerdict.DIFFERENT: Styled("DIFFERENT", _BAD),
    ComparisonVerdict.INCONCLUSIVE: Styled("inconclusive", _OPEN),
}


def _bytes_compared(namespace: VerifiedNamespace) -> str:
    """Return how many chunks were compared with their checksums, and what was found besides."""
    host, disk = namespace.host, namespace.disk
    read = format_size(host.verified_bytes + disk.verified_bytes)
    parts = [
        f"{disk.num_verified_chunks} of {namespace.num_chunks} chunks on disk and {host.num_verified_chunks} in host "
        f"memory are as stored ({read} read)"
    ]
    found = {
        "damaged on disk": disk.num_damaged_chunks,
        "damaged in host memory": host.num_damaged_chunks,
        "cannot be read": disk.num_refused_chunks,
        "differ between disk and host memory": namespace.num_differing_chunks,
        "in no tier (stored when next computed)": namespace.num_lost_chunks,
    }
    parts += [f"{number} {what}" for what, number in found.items() if number]
    return f"{'; '.join(parts)}; namespace {namespace.namespace_id[:SHORT_ID]}"


def _live_compared(result: VerifyResult, live: Comparison) -> str:
    """Return what vLLM was asked, and how far its answers are apart."""
    if live.verdict is ComparisonVerdict.INCONCLUSIVE:
        return live.why
    who = f"vLLM {result.vllm_version} ({result.model})"
    asked = f"{who} answered with {live.restored_tokens} of {result.num_tokens} tokens from kvtier and with its own"
    tokens = "the same tokens" if live.same_tokens else "other tokens"
    apart = f"logprobs at most {live.max_difference:.3g} apart" if live.max_difference else "equal logprobs"
    return f"{asked}: {tokens}, {apart}{f'; {live.why}' if live.why else ''}"


def _summary(results: Iterable[VerifyResult], skipped: list[str]) -> Iterator[str]:
    results = list(results)
    if not results and not skipped:
        yield "no such prompt is pinned: nothing was verified"
        return
    num_empty = sum(each.empty for each in results)
    results = [each for each in results if not each.empty]
    is_bad = [each.damaged or each.different for each in results]
    is_right = [each.conclusive and not bad for each, bad in zip(results, is_bad, strict=True)]
    counts = {
        "ok": sum(is_right),
        "damaged": sum(each.damaged for each in results),
        "different": sum(each.different for each in results),
        "not fully compared": sum(not (bad or right) for bad, right in zip(is_bad, is_right, strict=True)),
        "not verified": len(skipped) + num_empty,
    }
    parts = [f"{number} {word}" for word, number in counts.items() if number]
    yield f"verified {len(results)} {'prompt' if len(results) == 1 else 'prompts'}: {', '.join(parts)}"
