"""The methods of `Client` that are about files of prompts."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtier.errors import InvalidArgumentError
from kvtier.library.progress_events import OnProgress, ignore
from kvtier.library.prompt_calls import PromptCalls
from kvtier.library.rendering.recipe import Recipe, SourceKind
from kvtier.library.values.public_values import Prompt

if TYPE_CHECKING:
    from kvtier.library.declared import AppliedSet


class DeclaredCalls(PromptCalls):
    """Apply files, and write them."""

    def apply(
        self,
        *paths: str,
        text: str | None = None,
        prune: bool = False,
        take_over: bool = False,
        dry_run: bool = False,
        warm: bool = True,
        timeout_s: float = 600.0,
        on_progress: OnProgress = ignore,
    ) -> "AppliedSet":
        """Make prompts what files say, all at once: new ones are pinned, others changed, and nothing else touched.

        Where a vLLM answers, sources are rendered by it; else they are kept, and rendered when a vLLM with `warm_url`
        attaches, or by the next apply. What vLLM cannot use then, and what does not fit on disk,
        is in `refused` of the answer.

        Args:
            paths: Files, and folders with .yaml, .yml and .json files; docs/apply.md shows one.
            text: The text of such a file, instead of paths. It may not name other files.
            prune: End pins of the same sets that no file names.
            take_over: Move prompts that belong to other sets to those of the files; without it they are refused.
            dry_run: Only say what differs.
            warm: Have vLLM compute what was rendered, and wait until it is durable.
            timeout_s: Seconds for each prompt that is computed.
            on_progress: Called with each step.

        Raises:
            InvalidArgumentError: Paths and a text are given.
            DeclaredErrors: Files have mistakes, vLLM refuses prompts, they belong to other sets, or their pins were
                replaced meanwhile: all of them, with file, line and column. Nothing was applied.
            RenderError: vLLM ended while it rendered, and nothing was applied; or while it computed, and all was.
            OwnerQuotaError, QuotaExceededError: They do not fit; nothing was applied.
        """
        # Here, because its checks take a fifth of a second to load.
        from kvtier.library.declared import ApplyFlow, read_declared, read_declared_text

        if text is not None and paths:
            raise InvalidArgumentError("text", "...", "cannot go with paths; give one of them")
        declared = read_declared(paths) if text is None else read_declared_text(text, in_turns=self._IN_TURNS)
        flow = ApplyFlow(self._daemon, self._vllm, on_progress)
        return flow.run(declared, prune=prune, dry_run=dry_run, take_over=take_over, warm=warm, timeout_s=timeout_s)

    def export_config(self, *names: str) -> str:
        """Return operators' pins (of these names; none: all) as YAML that `apply` reads again without a difference."""
        from kvtier.library.declared import declared_yaml

        names = names or tuple(each.name for each in self.list() if each.pinned and each.origin == "named")
        prompts = [self.get(name) for name in names]
        return declared_yaml([(prompt, self._pinned_tokens(prompt)) for prompt in prompts])

    def _pinned_tokens(self, prompt: Prompt) -> Sequence[int]:
        """Return the token ids of a prompt that was pinned by them; none of one with a source."""
        is_source = prompt.recipe and Recipe.from_values(prompt.recipe).kind is not SourceKind.TOKENS
        return () if is_source else self.tokens(prompt.name)
