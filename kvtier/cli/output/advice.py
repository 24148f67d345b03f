"""What `kvtier advise` prints; it fits 80 columns."""

from collections.abc import Iterator, Sequence

from kvtier.cli.output.durations import format_duration
from kvtier.cli.output.grid import Grid, Part, Styled, column
from kvtier.config.units import format_size
from kvtier.library.values.public_values import Advice, AdvisedPrefix, ChangingPlace, NamespaceAdvice, Verdict
from kvtier.printable import printable

_NUM_OTHERS = 10  # of what is not worth a pin; --json has more
_NUM_PLACES = 5
_VERDICTS = {
    Verdict.CHOSEN: "worth a pin",
    Verdict.CONTAINED: "in longer ones",
    Verdict.TOO_SHORT: "too short",
    Verdict.TOO_FEW_REQUESTS: "too few requests",
    Verdict.ONE_PROMPT: "one prompt repeated",
    Verdict.OVER_BUDGET: "over budget",
    Verdict.NAMED: "pinned",
}
_OFF = (
    "Automatic pins are off, so no request is looked at. To see what is worth a pin, set",
    "cache.auto_pin to observe (nothing is pinned) or pin, and restart the daemon.",
)
_NOTHING = (
    "No request was seen yet: nothing is known. Requests are counted from the moment",
    "vLLM attaches; ask again when it has served some.",
)


def advice_details(advice: Advice) -> Iterator[Part]:
    """Yield what `kvtier advise` prints."""
    if advice.mode == "off":  # what was counted before is no advice for today
        yield from _OFF
        return
    seen = [each for each in advice.namespaces if each.requests_per_hour]
    if not seen:
        yield from _NOTHING
        return
    for number, namespace in enumerate(seen):
        yield from ("",) if number else ()
        yield from _namespace(namespace)
    yield ""
    if advice.mode == "pin":
        yield f"What is worth a pin is pinned by itself, up to {format_size(advice.max_bytes)} on disk."
    else:
        yield 'Nothing is pinned by itself: cache.auto_pin is "observe". Pin with: kvtier pin NAME --system FILE'


def _namespace(namespace: NamespaceAdvice) -> Iterator[Part]:
    chosen = [each for each in namespace.prefixes if each.verdict in (Verdict.CHOSEN, Verdict.NAMED)]
    others = [each for each in namespace.prefixes if each not in chosen]
    yield Styled(namespace.model or namespace.namespace_id[:12], "bold")
    yield f"{namespace.requests_per_hour:,.0f} requests an hour, {namespace.prompt_tokens_per_hour:,.0f} prompt tokens"
    if chosen:
        yield f"worth a pin: {len(chosen)}, {format_size(namespace.chosen_bytes)} on disk"
        yield (
            f"they save {_saved(namespace.saved_s_per_hour)} of prefill an hour, "
            f"{namespace.saved_share:.0%} of all prompt tokens"
        )
    else:
        yield "worth a pin: none yet"
    if namespace.prefixes:
        yield from ("", _prefixes([*chosen, *others[:_NUM_OTHERS]]))
    if not all(each.is_system_prompt for each in namespace.prefixes):
        yield "+ a fixed length: what these requests begin with may be longer"
    if len(others) > _NUM_OTHERS:
        yield f"and {len(others) - _NUM_OTHERS} more that are not worth one (--json lists them)"
    if namespace.places:
        yield from ("", *_places(namespace.places))


def _prefixes(prefixes: Sequence[AdvisedPrefix]) -> Grid:
    names = ("VERDICT", "TOKENS>", "REQ/H>", "PROMPTS>", "SAVES/H>", "SHARE>", "DISK>", "PIN")
    table = Grid(*(column(name.removesuffix(">"), right=name.endswith(">"), wraps=name == "PIN") for name in names))
    for each in prefixes:
        table.row(
            _VERDICTS.get(each.verdict, "?"),
            f"{each.num_tokens}{'' if each.is_system_prompt else '+'}",
            f"{each.requests_per_hour:.1f}",
            str(each.num_prompts),
            _saved(each.saved_s_per_hour),
            f"{each.saved_share:.0%}",
            format_size(each.added_bytes).replace("iB", "").replace(" ", ""),
            each.pin_name or "-",
        )
    return table


def _places(places: Sequence[ChangingPlace]) -> Iterator[Part]:
    yield Styled("Prompts that change in the middle", "bold")
    yield "What follows such a place is computed every time. Move what changes to the end"
    yield "of the system prompt, or into a user message: that saves more than any cache."
    for place in places[:_NUM_PLACES]:
        yield (
            f"- after {place.num_stable_tokens:,} of about {place.num_tokens:,} tokens, {place.num_prompts:,} "
            "different prompts:"
        )
        if place.before:  # a viewer gets none
            yield f"    ...{_one_line(place.before)[-60:]}"
        for example in place.examples:
            yield f"       [{_one_line(example)[:56]}]"


def _one_line(text: str) -> str:
    """Return text in the characters that it takes on the screen, so that it is cut by these."""
    return printable(" ".join(text.split()))


def _saved(seconds: float) -> str:
    return f"{seconds:.1f}s" if seconds < 10 else format_duration(seconds)
