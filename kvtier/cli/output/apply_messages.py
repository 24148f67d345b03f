"""What `kvtier apply` says while it works: a line for each prompt that vLLM rendered or computed, warnings once."""

from collections.abc import Sequence
from typing import Self

from kvtier.cli.output.streams import Output
from kvtier.core.limits import parse_version
from kvtier.library.progress_events import (
    Applied,
    Captured,
    CaptureOutcome,
    EmptyFile,
    EngineNotAttached,
    ModelNotServed,
    NotRendered,
    Progress,
    Rendered,
)
from kvtier.printable import MAX_LISTED


class ApplyMessages:
    """Gets the events of an apply; a context manager, whose end says what was warned of, once for all prompts."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._warned: dict[str, list[str]] = {}  # names of prompts by the text of the warning

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for warning, names in self._warned.items():
            self._output.warn(f"{listed(names)}: {warning}")

    def __call__(self, event: Progress) -> None:
        """Show an event."""
        match event:
            case Rendered():
                self._output.say(f"rendered: {event.name}, {event.num_tokens} tokens, by {event.model}")
                for warning in event.warnings:
                    self._warned.setdefault(warning, []).append(event.name)
            case NotRendered():
                self._output.say(f"nothing was rendered or computed: {event.problem}")
            case Applied():
                self._output.say("saved by the daemon")
            case Captured():
                is_durable = event.outcome is CaptureOutcome.DURABLE
                version = parse_version(event.prompt.name)
                name = version[0] if version is not None else event.prompt.name
                self._output.say(f"{'durable' if is_durable else 'not durable yet'}: {name}")
            case EmptyFile():
                self._output.warn(f"{event.path} is empty: it declares no prompt, and --prune ends none for it")
            case ModelNotServed():
                model = f"model {event.model}" if event.model else "any model"
                self._output.warn(
                    f"{prompts(event.num_prompts)} for {model}, which {event.url} does not serve: a vLLM "
                    "that serves it does the rest when it attaches (with `warm_url`), or apply again with its --url"
                )
            case EngineNotAttached():
                self._output.warn(
                    f"{prompts(event.num_prompts)} for model {event.model}, of which no vLLM with the kvtier connector "
                    "is attached to this daemon: nothing was computed; `kvtier doctor` says what is missing"
                )
            case _:
                pass


def prompts(number: int) -> str:
    """Return a number of prompts in words."""
    return f"{number} prompt{'' if number == 1 else 's'}"


def listed(names: Sequence[str]) -> str:
    """Return names for a message, those beyond a few as their number."""
    more = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
