"""What `kvtier pin` says while it works, and about what is missing at the end."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

from kvtier.cli.output.progress import capture_progress
from kvtier.cli.output.prompt_states import state_meaning
from kvtier.cli.output.streams import Output
from kvtier.cli.output.tables import HOW_TO_ATTACH, pin_result
from kvtier.library.flows.pin_flow import CONFIRM_TIMEOUT_S
from kvtier.library.progress_events import (
    Captured,
    CaptureOutcome,
    Capturing,
    Confirmed,
    NotRendered,
    Progress,
    Registered,
    Rendered,
    Replaced,
)
from kvtier.library.rendering.vllm_client import VllmUnreachableError
from kvtier.library.values.prompt_summary import summarize
from kvtier.library.values.public_values import Prompt, PromptState


@dataclass(frozen=True, kw_only=True)
class PinOptions:
    """What the command line asked for, as far as messages say it.

    Attributes:
        is_tokens: The source is token ids. The daemon keeps no file's name, so those have to be given again.
        url: Of vLLM, without secrets.
        timeout_s: For the capture.
    """

    name: str
    is_tokens: bool
    url: str
    warm: bool
    timeout_s: float


class PinMessages:
    """Gets the events of a pin; a context manager, because a bar is drawn while vLLM computes."""

    def __init__(self, options: PinOptions, output: Output) -> None:
        self._options, self._output = options, output
        self._made = ""  # name of the version that is to replace the pin; empty: it is the pin
        self._problem: VllmUnreachableError | None = None
        self._bar = ExitStack()
        self._draw: Callable[[Prompt], None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def __call__(self, event: Progress) -> None:
        """Show an event."""
        match event:
            case Rendered():
                self._output.say(f"rendered: {event.num_tokens} tokens, by {event.model} at {event.url}")
                for warning in event.warnings:
                    self._output.warn(warning)
            case Registered():
                self._output.say(f"registered: {event.name} (the pin is saved)")
                if event.prompt.name != event.name:
                    self._made = event.prompt.name
                    self._output.say(f"the pin that stands serves until {self._made} is durable")
            case NotRendered():
                self._problem = event.problem
            case Confirmed():
                confirmed, engines = event.prompt.num_confirmed, event.prompt.num_engines
                self._output.say(f"confirmed by {confirmed} of {engines} attached engines")
            case Capturing():
                if self._draw is None:
                    self._draw = self._bar.enter_context(capture_progress(self._output))
                self._draw(event.prompt)
            case Captured():
                self._bar.close()
                if event.outcome is not CaptureOutcome.DURABLE:
                    self._output.warn(self._explain(event.outcome, event.prompt))
            case Replaced():
                self._output.say(replaced(event))

    def conclude(self, prompt: Prompt) -> bool:
        """Write the answer and what is missing; return whether all that was asked for is done."""
        if self._problem is not None:
            return self._conclude_without_vllm(prompt, self._problem)
        num_chunks = summarize(prompt).num_chunks
        self._output.answer(prompt, *([pin_result(prompt)] if num_chunks else []))
        options, again = self._options, self._again
        if not prompt.num_engines and prompt.state is not PromptState.DURABLE:
            self._output.warn("no vLLM with the kvtier connector is attached to this daemon for this model")
            self._output.say(*HOW_TO_ATTACH, f"then capture it now:  {again}")
            return not options.warm or options.is_tokens
        if prompt.num_confirmed < prompt.num_engines:
            self._output.warn(
                f"{prompt.num_confirmed} of {prompt.num_engines} engines have confirmed the pin within "
                f"{CONFIRM_TIMEOUT_S:g} s; read vLLM's log, then run: {again}"
            )
            return False
        if prompt.num_confirmed and not num_chunks:
            self._output.warn(f"{prompt.num_tokens} tokens are less than one chunk; pin a longer prompt")
            return False
        if prompt.state is PromptState.DURABLE and prompt.name != options.name:
            self._output.warn(
                f"{prompt.name} is durable, and has not taken the name yet; see kvtier history {options.name}"
            )
            return False
        return prompt.state is PromptState.DURABLE or not options.warm

    def _conclude_without_vllm(self, prompt: Prompt, problem: VllmUnreachableError) -> bool:
        self._output.answer(prompt)
        if self._options.is_tokens:
            self._output.say(f"not warmed: {problem}")
            self._output.say("its chunks are captured when a vLLM with the kvtier connector first computes them")
            return True
        self._output.fail(str(problem))
        self._output.say("The source is stored, but not yet turned into tokens. When vLLM runs:", f"  {self._again}")
        return False

    def _explain(self, outcome: CaptureOutcome, prompt: Prompt) -> str:
        numbers = summarize(prompt)
        progress = f"{numbers.num_durable_chunks} of {numbers.num_chunks} chunks are on disk"
        if outcome is CaptureOutcome.OVER_QUOTA:
            return f"{progress}: {state_meaning(prompt)}"
        if outcome is CaptureOutcome.TIMED_OUT:
            shown = self._made or self._options.name
            return (
                f"{progress} after {self._options.timeout_s:g} s; the rest continues by itself; watch it with: kvtier "
                f"show {shown}"
            )
        return (
            f"{progress}, and vLLM has not offered the rest; they are captured when vLLM next computes them. If vLLM "
            f"is busy, run again later: {self._again}"
        )

    @property
    def _again(self) -> str:
        """The command that repeats it."""
        if self._made:
            return f"kvtier warm {self._made} --url {self._options.url}"
        source = " --tokens FILE" if self._options.is_tokens else ""
        return f"kvtier pin {self._options.name}{source} --url {self._options.url}"


def replaced(event: Replaced) -> str:
    return f"replaced: {event.name}; the version before is {event.previous}, and stays as cache"
