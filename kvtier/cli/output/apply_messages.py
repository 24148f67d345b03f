"""What `kvtier apply` says while it works: one line for a prompt that vLLM rendered or computed, one for the whole."""

from contextlib import ExitStack
from typing import Self

from kvtier.cli.output.streams import Output
from kvtier.library.progress_events import Applied, Captured, CaptureOutcome, NotRendered, Progress, Rendered


class ApplyMessages:
    """Gets the events of an apply; a context manager."""

    def __init__(self, output: Output) -> None:
        self._output, self._stack = output, ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __call__(self, event: Progress) -> None:
        """Show an event."""
        match event:
            case Rendered():
                self._output.say(f"rendered: {event.name}, {event.num_tokens} tokens, by {event.model}")
                for warning in event.warnings:
                    self._output.warn(f"{event.name}: {warning}")
            case NotRendered():
                self._output.say(f"not rendered: {event.problem}")
            case Applied():
                self._output.say("saved by the daemon")
            case Captured():
                is_durable = event.outcome is CaptureOutcome.DURABLE
                self._output.say(f"{'durable' if is_durable else 'not durable yet'}: {event.prompt.name}")
            case _:
                pass
