"""Applies declared prompts: what differs is rendered where vLLM runs, sent in one transaction, and then computed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvtier._pb import cache_pb2 as pb
from kvtier.client.admin import AdminClient
from kvtier.errors import RenderError
from kvtier.library.declared.difference import Change, ChangeKind, differences
from kvtier.library.declared.documents import NO_VALUE, DeclaredError, DeclaredErrors
from kvtier.library.declared.files import DeclaredPrompt, DeclaredSet
from kvtier.library.flows.pin_flow import PinFlow, PinJob
from kvtier.library.progress_events import Applied, NotRendered, OnProgress, Rendered
from kvtier.library.rendering.field_names import PYTHON_NAMES
from kvtier.library.rendering.recipe import SourceKind
from kvtier.library.rendering.render import render
from kvtier.library.rendering.vllm_client import ServedModel, VllmClient, VllmUnreachableError
from kvtier.library.values.conversion import prompt_of
from kvtier.library.values.public_values import Prompt, PromptState

_RENDERED_KINDS = (SourceKind.SYSTEM, SourceKind.MESSAGES, SourceKind.TEXT)


@dataclass(frozen=True, kw_only=True)
class AppliedSet:
    """What an apply did.

    Attributes:
        changes: One for each declared prompt, and for each pin that ended; by name.
        unrendered: Names of prompts that no vLLM has turned into tokens yet.
        incomplete: Names of those that were to be computed, and are not durable yet.
    """

    changes: Sequence[Change]
    unrendered: Sequence[str] = ()
    incomplete: Sequence[str] = ()

    @property
    def changed(self) -> bool:
        """Something differed."""
        return any(change.kind is not ChangeKind.UNCHANGED for change in self.changes)


@dataclass(kw_only=True)
class _Work:
    """One prompt to send, and what vLLM made of it."""

    change: Change
    tokens: tuple[int, ...] = ()
    served: ServedModel | None = field(default=None)

    @property
    def declared(self) -> DeclaredPrompt:
        assert self.change.declared is not None
        return self.change.declared


class ApplyFlow:
    """One daemon, and the vLLM that renders; the caller owns and closes both."""

    def __init__(self, client: AdminClient, vllm: VllmClient, on_progress: OnProgress) -> None:
        self._client, self._vllm, self._report = client, vllm, on_progress

    def run(
        self, declared: DeclaredSet, *, prune: bool, dry_run: bool, warm: bool = True, timeout_s: float = 600.0
    ) -> AppliedSet:
        """Apply.

        Raises:
            DeclaredErrors: vLLM refuses prompts, all of which it names; nothing was applied.
            KvtierError: The daemon refuses; nothing was applied.
        """
        prompts = [prompt_of(status) for status in self._client.list()]
        changes = differences(declared, prompts, prune=prune)
        work = [_Work(change=change) for change in changes if _is_to_send(change)]
        self._serve([each for each in work if each.declared.model or _is_rendered_kind(each)])
        self._render([each for each in work if _is_rendered_kind(each) and _is_to_render(each)])
        unrendered = [each.declared.name for each in work if _lacks_tokens(each)]
        work = [each for each in work if each.change.kind is not ChangeKind.UNCHANGED or each.tokens]
        unpinned = [change.name for change in changes if change.kind is ChangeKind.UNPIN]
        if not work and not unpinned:
            return AppliedSet(changes=changes, unrendered=unrendered)
        made = self._client.apply(_messages(work, unpinned, dry_run=dry_run))
        if dry_run:
            return AppliedSet(changes=changes, unrendered=unrendered)
        self._report(Applied(num_changed=len(work) + len(unpinned)))
        incomplete = list(self._warm(work, made, timeout_s)) if warm else []
        return AppliedSet(changes=changes, unrendered=unrendered, incomplete=incomplete)

    def _serve(self, work: Sequence[_Work]) -> None:
        """Find what vLLM serves for each: the names of an adapter and its path are vLLM's."""
        if not work:
            return
        try:
            models = self._vllm.models()
        except VllmUnreachableError as exc:
            self._report(NotRendered(problem=exc))
            return
        for each in work:
            each.served = _served(models, each.declared.model)

    def _render(self, work: Sequence[_Work]) -> None:
        """Turn sources into tokens, as far as vLLM serves their models."""
        tried = [self._render_one(each, each.served) for each in work if each.served is not None]
        errors = [error for error in tried if error is not None]
        if errors:
            raise DeclaredErrors(errors)

    def _render_one(self, work: _Work, served: ServedModel) -> DeclaredError | None:
        name, place = work.declared.name, work.declared.place
        try:
            rendering = render(work.declared.recipe, self._vllm, served.name)
        except VllmUnreachableError:
            raise
        except RenderError as exc:
            return DeclaredError(place, 0, 0, name, NO_VALUE, str(exc))
        if served.max_tokens and len(rendering.tokens) >= served.max_tokens:
            problem = f"has {len(rendering.tokens)} tokens; {served.name} takes {served.max_tokens} with the answer"
            return DeclaredError(place, 0, 0, name, NO_VALUE, problem)
        work.tokens = rendering.tokens
        self._report(
            Rendered(
                name=name,
                num_tokens=len(rendering.tokens),
                model=served.name,
                url=self._vllm.url,
                warnings=rendering.warnings,
            )
        )
        return None

    def _warm(self, work: Sequence[_Work], made: dict[str, str], timeout_s: float) -> Iterator[str]:
        """Have vLLM compute what it rendered, by priority; yield the names of what is not durable then."""
        flow = PinFlow(self._client, self._vllm, self._report, PYTHON_NAMES)
        for each in sorted(work, key=lambda each: -each.declared.priority):
            if each.served is None or not each.tokens:
                continue
            if each.declared.name not in made:  # a daemon that answers something else
                yield each.declared.name
                continue
            prompt = prompt_of(self._client.get(pin_id=made[each.declared.name]))
            job = PinJob(
                name=each.declared.name,
                recipe=each.declared.recipe,
                tokens=each.tokens,
                model=each.served.name,
                cache_salt=each.declared.cache_salt,
                timeout_s=timeout_s,
            )
            if flow.finish(job, prompt, each.served).state is not PromptState.DURABLE:
                yield each.declared.name


def _is_to_send(change: Change) -> bool:
    """Return whether a change concerns a declared prompt that is not as it is wanted, or not rendered yet."""
    if change.declared is None:
        return False
    return change.kind is not ChangeKind.UNCHANGED or _is_unrendered(change.standing)


def _is_unrendered(prompt: Prompt | None) -> bool:
    return prompt is not None and prompt.state is PromptState.UNRENDERED


def _is_to_render(work: _Work) -> bool:
    return work.change.kind is not ChangeKind.UPDATE or _is_unrendered(work.change.standing)


def _is_rendered_kind(work: _Work) -> bool:
    return work.declared.recipe.kind in _RENDERED_KINDS


def _lacks_tokens(work: _Work) -> bool:
    return _is_rendered_kind(work) and not work.tokens and _is_to_render(work)


def _served(models: Sequence[ServedModel], wanted: str) -> ServedModel | None:
    return next((model for model in models if wanted in ("", model.name)), None)


def _messages(work: Sequence[_Work], unpinned: Sequence[str], *, dry_run: bool) -> Iterator[pb.ApplyMessage]:
    yield pb.ApplyMessage(start=pb.ApplyStart(dry_run=dry_run))
    for each in work:
        yield pb.ApplyMessage(pin=_request(each))
    for name in unpinned:
        yield pb.ApplyMessage(unpin=name)


def _request(work: _Work) -> pb.PinRequest:
    wanted, served = work.declared, work.served if work.declared.model else None
    request = pb.PinRequest(
        name=wanted.name,
        tokens=work.tokens or wanted.tokens,
        model=served.base if served else work.served.name if work.served else wanted.model,
        lora_name=served.lora_name if served else "",
        lora_path=served.lora_path if served else "",
        cache_salt=wanted.cache_salt,
        recipe_json=wanted.recipe.to_json(),
        ttl_s=wanted.ttl_s,
        sliding=wanted.sliding,
        priority=wanted.priority,
        owner=wanted.owner,
        labels=pb.Labels(values=wanted.labels),
    )
    request.public = wanted.public
    return request
