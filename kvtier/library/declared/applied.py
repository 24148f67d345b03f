"""What an apply did, and what engines or the disk quota refuse of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvtier.library.declared.difference import Change, ChangeKind
from kvtier.library.values.public_values import Prompt, PromptState

_OVER_QUOTA = "the disk quota keeps it from becoming durable; unpin and evict a prompt, or raise disk.bytes"


@dataclass(frozen=True, kw_only=True)
class RefusedPrompt:
    """A declared prompt that is pinned, and cannot become durable: `why` says what to do."""

    name: str
    why: str


@dataclass(frozen=True, kw_only=True)
class AppliedSet:
    """What an apply did.

    Attributes:
        changes: One for each declared prompt, and for each pin that ended; by name.
        unrendered: Names of prompts that no vLLM has turned into tokens yet.
        incomplete: Names of those that were to be computed, and are not durable yet.
        refused: Declared prompts that engines cannot use, or that the disk quota stops; by name. The others are
            applied. In each apply, also when nothing differs.
        not_in_files: Pins of the same sets that no file names; pruning ends them.
    """

    changes: Sequence[Change]
    unrendered: Sequence[str] = ()
    incomplete: Sequence[str] = ()
    refused: Sequence[RefusedPrompt] = ()
    not_in_files: Sequence[str] = ()

    @property
    def changed(self) -> bool:
        """Something differed."""
        return any(change.kind is not ChangeKind.UNCHANGED for change in self.changes)


def refused_prompts(
    names: Sequence[str], prompts: Sequence[Prompt], said: Mapping[str, str], made: Mapping[str, str]
) -> Iterator[RefusedPrompt]:
    """Yield which of these are refused, or are to be replaced by a version that is, or was.

    Args:
        prompts: As the daemon lists them.
        said: By name, what computing them failed with.
        made: By name, the pin id of what was to be computed.
    """
    known = {prompt.name: prompt for prompt in prompts}
    for name in sorted(names):
        standing = known.get(name)
        version = known.get(standing.replacement) if standing is not None else None
        reasons = (_why_refused(each) for each in (standing, version) if each is not None and each.pinned)
        why = next(filter(None, reasons), "")
        newest = version or standing
        if not why and newest is not None and newest.pinned:
            # A version that no vLLM could use is dropped after a while, and then the pin looks as if all was well.
            is_gone = made.get(name, newest.pin_id) != newest.pin_id
            why = said.get(name, "") if is_gone or newest.state is not PromptState.DURABLE else ""
        if why:
            yield RefusedPrompt(name=name, why=why)


def _why_refused(prompt: Prompt) -> str:
    if prompt.state is PromptState.REFUSED:
        return prompt.error
    return _OVER_QUOTA if prompt.state is PromptState.OVER_QUOTA else ""
