"""The results of the restarts as a table, in Markdown."""

import statistics
from collections.abc import Iterable, Sequence

from benchmarks.measuring.chat_requests import Answer
from benchmarks.measuring.machine import spread
from benchmarks.peers.restarts_in_turns import Results, Start, is_hit
from benchmarks.systems.system import Ending

MIB = 2**20
HEADER = (
    "system",
    "ended before by",
    "first request",
    "cached tokens",
    "from",
    "TTFT s",
    "x prefix-cache hit",
    "read MiB (device)",
    "later TTFT s",
    "later read MiB (device)",
    "on disk MiB",
    "max logprob difference",
)


def table(results: Results) -> str:
    """Return the results as a Markdown table: vLLM alone first, then a row per system and ending."""
    rows = [HEADER, ("---",) * len(HEADER), *_frame_rows(results)]
    for name, starts in results.starts.items():
        for ending in Ending:
            chosen = [start for start in starts if start.ending is ending]
            if chosen:
                rows.append(_row(name, ending, chosen, results))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _frame_rows(results: Results) -> list[tuple[str, ...]]:
    rows = []
    cold = [answer for answers in results.cold.values() for answer in answers]
    hits = [answer for answers in results.prefix_hits.values() for answer in answers.values()]
    own_s = {number: _median_ttft_s(answers.values()) for number, answers in results.prefix_hits.items()}
    if cold:
        ratios = [answer.ttft_s / own_s[number] for number, answers in results.cold.items() for answer in answers]
        rows.append(_frame_row("vLLM alone, cold", cold, spread(ratios, digits=1)))
    if hits:
        rows.append(_frame_row("vLLM alone, its prefix cache", hits, "1"))
    return rows


def _frame_row(name: str, answers: Sequence[Answer], ratio: str) -> tuple[str, ...]:
    ttft = spread([answer.ttft_s for answer in answers], digits=3)
    return (name, "", "", _cached(answers), _sources(answers), ttft, ratio, "", "", "", "", "")


def _row(name: str, ending: Ending, starts: Sequence[Start], results: Results) -> tuple[str, ...]:
    firsts = [start.first for start in starts]
    later = [answer for start in starts for answer in start.again]
    num_hits = sum(map(is_hit, firsts))
    ratios = [start.first.ttft_s / _median_ttft_s(results.prefix_hits[start.round].values()) for start in starts]
    missed_later = len(later) - sum(map(is_hit, later))
    return (
        name,
        ending.value,
        f"hit {num_hits} of {len(firsts)}" if num_hits else "miss",
        _cached(firsts),
        _sources(firsts),
        spread([answer.ttft_s for answer in firsts], digits=3),
        spread(ratios, digits=1),
        _read(firsts),
        spread([answer.ttft_s for answer in later], digits=3) + (f", {missed_later} missed" if missed_later else ""),
        _read(later),
        f"{results.stored_bytes[name] / MIB:.1f}",
        f"{max(_logprob_differences(starts, results), default=float('nan')):.4f}",
    )


def _median_ttft_s(answers: Iterable[Answer]) -> float:
    return statistics.median(answer.ttft_s for answer in answers)


def _cached(answers: Sequence[Answer]) -> str:
    cached, prompt = ([getattr(answer, name) for answer in answers] for name in ("cached_tokens", "prompt_tokens"))
    return f"{statistics.median(cached):.0f} of {statistics.median(prompt):.0f}"


def _sources(answers: Sequence[Answer]) -> str:
    return " / ".join(sorted({"+".join(answer.by_source) or "computed" for answer in answers}))


def _read(answers: Sequence[Answer]) -> str:
    calls, device = (
        statistics.median(values) / MIB
        for values in ([answer.read.calls for answer in answers], [answer.read.device for answer in answers])
    )
    return f"{calls:.1f} ({device:.1f})"


def _logprob_differences(starts: Sequence[Start], results: Results) -> Iterable[float]:
    """Yield differences to the logprobs of vLLM alone for the same question.

    Only as far as both wrote the same tokens: at a tie rounding makes them part. Systems that restore fewer tokens
    compute more of them, and round differently.
    """
    for start in starts:
        for number, answer in start.numbered():
            own = results.prefix_hits[start.round][number]
            for token, logprob, own_token, own_logprob in zip(
                answer.tokens, answer.logprobs, own.tokens, own.logprobs, strict=True
            ):
                yield abs(logprob - own_logprob) if token == own_token else 0.0
                if token != own_token:
                    break
