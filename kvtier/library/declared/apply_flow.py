"""Applies declared prompts: what differs is rendered where vLLM runs, sent in one transaction, and then computed."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from kvtier._pb import cache_pb2 as pb
from kvtier.client.admin import AdminClient
from kvtier.errors import KvtierError, PromptExistsError, PromptNotFoundError, PromptUnusableError, RenderError
from kvtier.library.declared.applied import AppliedSet, refused_prompts
from kvtier.library.declared.difference import (
    Change,
    ChangeKind,
    differences,
    needs_served,
    not_in_files,
    of_other_sets,
    set_of,
    source_digest,
)
from kvtier.library.declared.documents import NO_VALUE, DeclaredError, DeclaredErrors
from kvtier.library.declared.entries import DeclaredPrompt
from kvtier.library.declared.files import DeclaredSet
from kvtier.library.flows.pin_flow import PinFlow, PinJob
from kvtier.library.progress_events import (
    Applied,
    EmptyFile,
    EngineNotAttached,
    ModelNotServed,
    NotRendered,
    OnProgress,
    Rendered,
)
from kvtier.library.rendering.field_names import PYTHON_NAMES
from kvtier.library.rendering.recipe import SourceKind
from kvtier.library.rendering.render import render
from kvtier.library.rendering.vllm_client import ServedModel, VllmClient, VllmUnreachableError
from kvtier.library.values.conversion import prompt_of
from kvtier.library.values.public_values import Prompt, PromptState
from kvtier.printable import shown_value

_RENDERED_KINDS = (SourceKind.SYSTEM, SourceKind.MESSAGES, SourceKind.TEXT)
_WAITING_STATES = (PromptState.WAITING, PromptState.CAPTURING, PromptState.STALE, PromptState.REFRESHING)
"""Of prompts that become durable when vLLM computes them."""
_MOVING_STATES = (PromptState.UNRENDERED, PromptState.REFUSED)
"""Of pins whose id moves without another client: a vLLM with `warm_url` renders them, a refused version is dropped."""
_GONE = (
    "what was pinned for it is gone: no vLLM could use it, or another client has replaced or ended it since; see "
    "`kvtier history`, and apply again"
)


@dataclass(kw_only=True)
class _Work:
    """One prompt to send, or to compute, and what vLLM made of it.

    Attributes:
        tokens: What vLLM rendered.
        served: What computes it.
    """

    change: Change
    tokens: tuple[int, ...] = field(default=(), repr=False)
    served: ServedModel | None = field(default=None)

    @property
    def declared(self) -> DeclaredPrompt:
        assert self.change.declared is not None
        return self.change.declared

    @property
    def standing(self) -> Prompt:
        assert self.change.standing is not None
        return self.change.standing

    @property
    def named(self) -> ServedModel | None:
        """What its pin is for: token ids that name no model are for any, also if one computes them."""
        return self.served if _needs_vllm(self) else None


class ApplyFlow:
    """One daemon, and the vLLM that renders; the caller owns and closes both."""

    def __init__(self, client: AdminClient, vllm: VllmClient, on_progress: OnProgress) -> None:
        self._client, self._vllm, self._report = client, vllm, on_progress

    def run(
        self,
        declared: DeclaredSet,
        *,
        prune: bool,
        dry_run: bool,
        take_over: bool = False,
        warm: bool = True,
        timeout_s: float = 600.0,
    ) -> AppliedSet:
        """Apply.

        Raises:
            DeclaredErrors: vLLM refuses prompts, other sets have them, or their pins moved: all that are; nothing was
                applied.
            VllmUnreachableError: vLLM ended while it rendered, and nothing was applied; or computed, and all was.
            KvtierError: The daemon refuses; nothing was applied.
        """
        for path in declared.empty_files:
            self._report(EmptyFile(path=path))
        prompts = self._listed()
        changes = differences(declared, prompts, prune=prune)
        if any(map(needs_served, changes)):
            changes = differences(declared, prompts, prune=prune, served=self._served_by_name())
        work = [_Work(change=change) for change in changes if _is_to_send(change)]
        warm = warm and not dry_run
        waiting = [_Work(change=change) for change in changes if warm and _is_unchanged_waiting(change)]
        self._serve([*(each for each in work if _needs_vllm(each) or (warm and _is_to_warm(each))), *waiting])
        errors = [] if take_over else list(of_other_sets(changes))
        errors += self._render([each for each in work if _is_rendered_kind(each) and _is_to_render(each)])
        if errors:
            raise DeclaredErrors(errors)
        unrendered = [each.declared.name for each in work if _lacks_tokens(each)]
        work = [each for each in work if each.change.kind is not ChangeKind.UNCHANGED or each.tokens]
        unpinned = [change for change in changes if change.kind is ChangeKind.UNPIN]
        failed = dict[str, str]()
        made = {each.declared.name: each.standing.pin_id for each in waiting}
        if work or unpinned:
            made |= self._send(work, unpinned, dry_run=dry_run)
            if not dry_run:
                self._report(Applied(num_changed=len(work) + len(unpinned)))
        if made and not dry_run:
            failed = self._warm([*work, *waiting], made, timeout_s) if warm else {}
            prompts = self._listed()
        refused = list(refused_prompts(list(declared.prompts), prompts, failed, made))
        is_done = {each.name for each in refused}
        is_done |= {each.name for each in prompts if _is_done(each, made)}
        return AppliedSet(
            changes=changes,
            unrendered=unrendered,
            incomplete=[name for name in failed if name not in is_done],
            refused=refused,
            not_in_files=[] if prune else not_in_files(declared, prompts),
        )

    def _listed(self) -> list[Prompt]:
        return [prompt_of(status) for status in self._client.list()]

    def _served_by_name(self) -> dict[str, ServedModel]:
        """Return what vLLM serves; nothing if none answers."""
        with suppress(VllmUnreachableError):  # `_serve` reports it
            return {each.name: each for each in self._vllm.models()}
        return {}

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
        unserved = Counter(each.declared.model for each in work if each.served is None)
        for model, num_prompts in unserved.items():
            self._report(ModelNotServed(model=model, num_prompts=num_prompts, url=self._vllm.url))

    def _render(self, work: Sequence[_Work]) -> list[DeclaredError]:
        """Turn sources into tokens, as far as vLLM serves their models; return what vLLM refuses."""
        tried = [self._render_one(each, each.served) for each in work if each.served is not None]
        return [error for error in tried if error is not None]

    def _render_one(self, work: _Work, served: ServedModel) -> DeclaredError | None:
        try:
            rendering = render(work.declared.recipe, self._vllm, served.name)
        except VllmUnreachableError:
            raise
        except RenderError as exc:
            return work.declared.error(NO_VALUE, str(exc))
        if served.max_tokens and len(rendering.tokens) >= served.max_tokens:
            problem = f"has {len(rendering.tokens)} tokens; {served.name} takes {served.max_tokens} with the answer"
            return work.declared.error(NO_VALUE, problem)
        work.tokens = rendering.tokens
        self._report(
            Rendered(
                name=work.declared.name,
                num_tokens=len(rendering.tokens),
                model=served.name,
                url=self._vllm.url,
                warnings=rendering.warnings,
            )
        )
        return None

    def _send(self, work: Sequence[_Work], unpinned: Sequence[Change], *, dry_run: bool) -> dict[str, str]:
        """Send all of it; return the pin id of what each pin was made, by its name.

        Raises:
            DeclaredErrors: A pin is not the one that was compared; nothing was applied.
            KvtierError: So it is with one that no file names.
        """
        try:
            return self._client.apply(_messages(work, unpinned, dry_run=dry_run))
        except (PromptNotFoundError, PromptExistsError) as exc:
            problem = f"{_moved_how(exc)} since it was compared with the files; apply again"
            if moved := [each.declared for each in work if _is_about(exc, each.change)]:
                raise DeclaredErrors([each.error(NO_VALUE, problem) for each in moved]) from exc
            if ended := [change.name for change in unpinned if _is_about(exc, change)]:
                raise KvtierError(f"{', '.join(ended)}: {problem}; nothing was applied") from exc
            raise

    def _tokens(self, work: _Work, pin_id: str) -> tuple[int, ...]:
        """Return what vLLM rendered now, or what was sent before; nothing of what is not rendered yet."""
        if work.tokens or work.declared.tokens or not _is_waiting(work.change):
            return work.tokens or work.declared.tokens
        # It may have another name than when it was compared: a replacement took the name of its pin.
        return self._client.tokens(self._client.get(pin_id=pin_id).name)

    def _warm(self, work: Sequence[_Work], made: dict[str, str], timeout_s: float) -> dict[str, str]:
        """Have vLLM compute what it rendered, by priority.

        Returns:
            What is not durable then, by name: why vLLM cannot use it, empty if it can.
        """
        failed, unattached = dict[str, str](), Counter[str]()
        for each in sorted(work, key=lambda each: -each.declared.priority):
            name = each.declared.name
            if each.served is None or not _is_to_warm(each):
                continue
            # Each would wait some seconds for an engine; and a daemon that answers something else has no such pin.
            if each.served.name in unattached or name not in made:
                unattached[each.served.name] += name in made
                failed[name] = ""
                continue
            try:
                prompt = self._compute(each, each.served, made[name], timeout_s)
            except VllmUnreachableError:
                raise  # it is so for the others, too
            except PromptNotFoundError:
                failed[name] = _GONE
                continue
            except (PromptUnusableError, RenderError) as exc:
                failed[name] = str(exc)
                continue
            if prompt.state is not PromptState.DURABLE:
                failed[name] = ""
                if not prompt.num_engines:
                    unattached[each.served.name] += 1
        for model, num_prompts in unattached.items():
            self._report(EngineNotAttached(model=model, num_prompts=num_prompts))
        return failed

    def _compute(self, work: _Work, served: ServedModel, pin_id: str, timeout_s: float) -> Prompt:
        job = PinJob(
            name=work.declared.name,
            recipe=work.declared.recipe,
            tokens=self._tokens(work, pin_id),
            model=served.name,
            cache_salt=work.declared.cache_salt,
            timeout_s=timeout_s,
        )
        flow = PinFlow(self._client, self._vllm, self._report, PYTHON_NAMES)
        return flow.finish(job, prompt_of(self._client.get(pin_id=pin_id)), served)


def _is_to_send(change: Change) -> bool:
    """Return whether a change concerns a declared prompt that is not as it is wanted, or not rendered yet."""
    if change.declared is None:
        return False
    return change.kind is not ChangeKind.UNCHANGED or _is_unrendered(change.standing)


def _is_waiting(change: Change) -> bool:
    """Return whether a declared prompt has its content, but no vLLM has computed it."""
    standing, kinds = change.standing, (ChangeKind.UNCHANGED, ChangeKind.UPDATE)
    return change.kind in kinds and standing is not None and standing.state in _WAITING_STATES


def _is_unchanged_waiting(change: Change) -> bool:
    return change.kind is ChangeKind.UNCHANGED and _is_waiting(change)


def _is_to_warm(work: _Work) -> bool:
    """Return whether there are tokens that vLLM has not computed."""
    is_of_tokens = work.change.kind is not ChangeKind.UPDATE and bool(work.declared.tokens)
    return bool(work.tokens) or is_of_tokens or _is_waiting(work.change)


def _is_done(prompt: Prompt, made: Mapping[str, str]) -> bool:
    """Return whether a prompt is durable, and the one that was made of its name if any was."""
    is_made = made.get(prompt.name, prompt.pin_id) == prompt.pin_id
    return prompt.state is PromptState.DURABLE and not prompt.replacement and is_made


def _is_unrendered(prompt: Prompt | None) -> bool:
    return prompt is not None and prompt.state is PromptState.UNRENDERED


def _is_to_render(work: _Work) -> bool:
    return work.change.kind is not ChangeKind.UPDATE or _is_unrendered(work.change.standing)


def _is_rendered_kind(work: _Work) -> bool:
    return work.declared.recipe.kind in _RENDERED_KINDS


def _needs_vllm(work: _Work) -> bool:
    """Return whether only vLLM knows what to send: its tokens, or what the name of its model stands for."""
    return bool(work.declared.model) or _is_rendered_kind(work)


def _lacks_tokens(work: _Work) -> bool:
    return _is_rendered_kind(work) and not work.tokens and _is_to_render(work)


def _served(models: Sequence[ServedModel], wanted: str) -> ServedModel | None:
    return next((model for model in models if wanted in ("", model.name)), None)


def _messages(work: Sequence[_Work], unpinned: Sequence[Change], *, dry_run: bool) -> Iterator[pb.ApplyMessage]:
    yield pb.ApplyMessage(start=pb.ApplyStart(dry_run=dry_run))
    for each in work:
        yield pb.ApplyMessage(pin=_request(each), expected=_expected(each.change))
    for change in unpinned:
        yield pb.ApplyMessage(unpin=change.name, expected=_expected(change))


def _has_source(work: _Work) -> bool:
    """Return whether the pin stays as it is but for how: then its source says which it is, and not what vLLM serves.

    With tokens the daemon compares adapters too, and without a vLLM the adapter of a model's name is not known.
    """
    change = work.change
    is_update = change.kind is ChangeKind.UPDATE and change.standing is not None
    return is_update and work.standing.source_digest == source_digest(work.declared.recipe)


def _compared_pin_id(change: Change) -> str:
    """Return the id of the pin that was compared with the files; empty: there is none, or its id moves by itself."""
    standing = change.standing
    return "" if standing is None or standing.state in _MOVING_STATES else standing.pin_id


def _expected(change: Change) -> pb.ExpectedPin:
    """Return what was compared: the daemon refuses all where it is not so any longer."""
    standing = change.standing
    if standing is None:
        return pb.ExpectedPin(absent=True, set=change.declared.set_name if change.declared else "")
    # One that moved by itself has the content that is sent, else it was not compared; a pin that ends has no content.
    pin_id = standing.pin_id if change.declared else _compared_pin_id(change)
    return pb.ExpectedPin(pin_id=pin_id, set=set_of(standing))


def _is_about(refusal: KvtierError, change: Change) -> bool:
    """Return whether the daemon refused because of this pin: it says the name, or only the id if it is an older one."""
    pin_id, text = _compared_pin_id(change), str(refusal)
    return shown_value(change.name) in text or repr(change.name) in text or bool(pin_id and pin_id in text)


def _moved_how(refusal: KvtierError) -> str:
    if isinstance(refusal, PromptExistsError):
        return "it was pinned by another client"
    return "its pin was replaced, ended or moved to another set"


def _request(work: _Work) -> pb.PinRequest:
    wanted, served = work.declared, work.named if work.declared.model else None
    request = pb.PinRequest(
        name=wanted.name,
        tokens=work.tokens or (() if _has_source(work) else wanted.tokens),
        model=served.base if served else work.named.name if work.named else wanted.model,
        lora_name=served.lora_name if served else "",
        lora_path=served.lora_path if served else "",
        cache_salt=wanted.cache_salt,
        recipe_json=wanted.recipe.to_json(),
        ttl_s=wanted.ttl_s,
        sliding=wanted.sliding,
        priority=wanted.priority,
        owner=wanted.owner,
        labels=pb.Labels(values=wanted.labels),
        if_pin_id=_compared_pin_id(work.change),  # for a daemon that does not know what is expected
    )
    request.public = wanted.public
    return request
