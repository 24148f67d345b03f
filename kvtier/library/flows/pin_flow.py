"""Pins, step by step: render, register, confirm, warm, wait for a replacement."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvtier._pb.cache_pb2 import Labels, PinRequest
from kvtier.client.admin import AdminClient
from kvtier.client.warm_requests import new_request_id
from kvtier.concurrency.pauses import POLL_S
from kvtier.core.limits import parse_version, version_name
from kvtier.errors import InvalidArgumentError, PromptExistsError, PromptUnusableError
from kvtier.library.flows.capture import capture, watched
from kvtier.library.progress_events import (
    Captured,
    Capturing,
    Confirmed,
    NotRendered,
    OnProgress,
    Registered,
    Rendered,
    Replaced,
)
from kvtier.library.rendering.field_names import FieldNames
from kvtier.library.rendering.recipe import Recipe, SourceKind
from kvtier.library.rendering.render import render
from kvtier.library.rendering.vllm_client import ServedModel, VllmClient, VllmUnreachableError
from kvtier.library.values.conversion import checked_message, given, prompt_of
from kvtier.library.values.public_values import Prompt, PromptState

CONFIRM_TIMEOUT_S = 10.0
NO_ENGINE_TIMEOUT_S = 3.0
REPLACE_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class PinJob:
    """What to pin, and how.

    Attributes:
        tokens: Token ids, for a source of that kind.
        model: Empty: the first that vLLM serves.
        ttl_s: Until the pin ends; 0: never. None, as in the other fields of how it is pinned: as it is.
        warm: Have vLLM compute it now.
        timeout_s: For the capture.
    """

    name: str
    recipe: Recipe
    tokens: tuple[int, ...] = field(default=(), repr=False)
    model: str = ""
    cache_salt: str = field(default="", repr=False)
    ttl_s: int | None = None
    priority: int | None = None
    public: bool | None = None
    sliding: bool | None = None
    owner: str | None = None
    labels: Mapping[str, str] | None = None
    replace: bool = False
    warm: bool = True
    timeout_s: float = 600.0


class PinFlow:
    """Runs one job with one daemon and one vLLM; the caller owns and closes both."""

    def __init__(self, client: AdminClient, vllm: VllmClient, on_progress: OnProgress, names: FieldNames) -> None:
        self._client, self._vllm, self._report, self._names = client, vllm, on_progress, names

    def run(self, job: PinJob) -> Prompt:
        """Pin; return the prompt as it is then, which may not be durable. KvtierError: the daemon or vLLM refused."""
        job.recipe.to_json()  # a source that is too long is refused before vLLM reads it
        try:
            served = self._served_model(job.model)
            if job.recipe.kind is not SourceKind.TOKENS:
                job = self._rendered(job, served)
        except VllmUnreachableError as exc:
            return self._pin_without_vllm(job, exc)
        return self.finish(job, self._register(job, served), served)

    def finish(self, job: PinJob, prompt: Prompt, served: ServedModel) -> Prompt:
        """Do the rest for a prompt that is registered: have it confirmed, computed, and take its place; as `run`."""
        made = prompt.name
        # From here on the pin stays, also if a later step fails.
        if prompt.state is not PromptState.DURABLE:
            prompt = self._confirm(job, prompt)
        if prompt.error and made == job.name:
            raise PromptUnusableError(
                f"prompt {job.name!r} is registered, but vLLM cannot use it: {prompt.error}. To remove it: "
                f"kvtier unpin {job.name}, then kvtier evict {job.name}"
            )
        if job.warm and prompt.num_confirmed:
            prompt = self._capture(job, prompt, served)
        return await_replacement(self._client, made if made != job.name else "", prompt, self._report)

    def _served_model(self, wanted: str) -> ServedModel:
        models = self._vllm.models()
        if not models:
            raise InvalidArgumentError(self._names["url"], self._vllm.url, "serves no model; is it the right vLLM?")
        for model in models:
            if wanted in ("", model.name):
                return model
        names = ", ".join(model.name for model in models)
        problem = f"is not served at {self._vllm.url}; vLLM serves {names}"
        raise InvalidArgumentError(self._names["model"], wanted, problem)

    def _rendered(self, job: PinJob, served: ServedModel) -> PinJob:
        rendering = render(job.recipe, self._vllm, served.name)
        self._report(
            Rendered(
                name=job.name,
                num_tokens=len(rendering.tokens),
                model=served.name,
                url=self._vllm.url,
                warnings=rendering.warnings,
            )
        )
        return replace(job, tokens=rendering.tokens, model=served.name)

    def _register(self, job: PinJob, served: ServedModel | None) -> Prompt:
        named = served if job.model else None
        request = checked_message(
            PinRequest,
            name=job.name,
            tokens=job.tokens,
            model=named.base if named else job.model,
            lora_name=named.lora_name if named else "",
            lora_path=named.lora_path if named else "",
            cache_salt=job.cache_salt,
            recipe_json=job.recipe.to_json(),
            ttl_s=job.ttl_s,
            priority=job.priority,
            **given(public=job.public, sliding=job.sliding),
            owner=job.owner,
            labels=None if job.labels is None else Labels(values=job.labels),
            replace=job.replace,
        )
        prompt = prompt_of(self._client.pin(request))
        self._report(Registered(name=job.name, prompt=prompt))
        return prompt

    def _pin_without_vllm(self, job: PinJob, problem: VllmUnreachableError) -> Prompt:
        """Register without vLLM: token ids need none, and a recipe is stored until there is one.

        A rendered prompt is never replaced by one that is not rendered: then `problem` is raised.
        """
        if job.replace and not job.tokens:
            raise problem
        try:
            prompt = self._register(job, None)
        except PromptExistsError as exc:
            if not job.tokens:
                raise problem from exc
            raise
        if prompt.num_tokens and not job.tokens:  # it was rendered before, and was to be computed now
            raise problem
        self._report(NotRendered(problem=problem))
        return prompt

    def _confirm(self, job: PinJob, prompt: Prompt) -> Prompt:
        """Wait until every engine that serves its model has recognized the prompt."""
        started_s = time.monotonic()
        # A connector attaches within 2 s after its daemon has started.
        no_engine_timeout_s = NO_ENGINE_TIMEOUT_S if job.warm else 0.0
        with watched(self._client, prompt.pin_id, CONFIRM_TIMEOUT_S) as next_status:
            while not (prompt.error or 0 < prompt.num_engines == prompt.num_confirmed):
                timeout_s = CONFIRM_TIMEOUT_S if prompt.num_engines else no_engine_timeout_s
                if time.monotonic() - started_s > timeout_s:
                    return prompt
                prompt = next_status() or prompt
        if not prompt.error:
            self._report(Confirmed(prompt=prompt))
        return prompt

    def _capture(self, job: PinJob, prompt: Prompt, served: ServedModel) -> Prompt:
        def send() -> None:
            self._vllm.warm(served.name, job.tokens, job.cache_salt, job.timeout_s, request_id=new_request_id())

        def show(newer: Prompt) -> None:
            self._report(Capturing(prompt=newer))

        with watched(self._client, prompt.pin_id, job.timeout_s + 1) as next_status:
            show(prompt)
            prompt, outcome = capture(prompt, next_status, send, timeout_s=job.timeout_s, on_status=show)
        self._report(Captured(prompt=prompt, outcome=outcome))
        return prompt


def await_replacement(client: AdminClient, made: str, prompt: Prompt, on_progress: OnProgress) -> Prompt:
    """Wait until a version that is durable has the name of the pin that it replaces; return its status then.

    Args:
        client: Of the daemon.
        made: The name of what was pinned, as the daemon answered; nothing is awaited if that is no version.
        prompt: Of it, now.
        on_progress: Gets Replaced.

    Raises:
        PromptUnusableError: No engine can use it.
    """
    version, ends_s = parse_version(made), time.monotonic() + REPLACE_TIMEOUT_S
    if version is None:
        return prompt
    name, number = version
    if prompt.error and not prompt.num_confirmed:
        raise PromptUnusableError(f"vLLM cannot use it: {prompt.error}. The pin {name!r} that stands was not changed")
    while prompt.name != name and prompt.state is PromptState.DURABLE and time.monotonic() < ends_s:
        time.sleep(POLL_S)
        prompt = prompt_of(client.get(pin_id=prompt.pin_id))
    if prompt.name == name:
        on_progress(Replaced(name=name, previous=version_name(name, number - 1)))
    return prompt
