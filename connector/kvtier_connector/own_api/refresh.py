"""Pins that are not durable for this engine: their sources are rendered by vLLM, and vLLM computes what is missing.

That is so for prompts that were registered before a vLLM ran, and for all pins when weights, dtype or block size are
others than before: then this engine has another namespace, which holds nothing yet. When the chat template is another
one, sources render to other tokens: then a version beside the pin gets them, and takes its place when it is durable
(ADR 27).

Works in the thread of the warm start, only while no request of a user is open in this engine.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier._pb.cache_pb2 import PinRequest, PromptStatus
from kvtier.client.admin import AdminClient
from kvtier.client.warm_requests import by_importance
from kvtier.core.tokens import TokenIds
from kvtier.errors import DaemonUnreachableError, KvtierError
from kvtier.library.rendering.recipe import Recipe, SourceKind
from kvtier.library.rendering.render import render
from kvtier.library.rendering.vllm_client import ServedModel, VllmClient, VllmUnreachableError
from kvtier_connector.engine.facts import EngineFacts

logger = logging.getLogger(__name__)

PERIOD_S = 5.0
"""Between two looks at what is unfinished."""
_RETRY_S, _MAX_RETRY_S = 10.0, 600.0
"""After an attempt at a prompt; twice as long after each further one, also if it was finished and was lost again soon:
pins that host memory cannot hold together would push one another out, and be computed again, for ever."""
_UNREACHABLE_S = 60.0
"""After vLLM's API server did not answer."""
_SAMPLES = 2
"""Of the sources of one shape that are rendered to see whether they still render to their tokens."""
_MAX_FAILED = 8
"""Of them that could not be rendered, before the others of the shape are left."""
_OPERATORS = ("named", "replacement")

Shape = tuple[object, ...]
"""What makes sources alike for a chat template: kind, whether there are tools, the template's kwargs, adapter."""


class Warmer(Protocol):
    """Has vLLM compute a prompt, by a completion of one token."""

    def __call__(self, daemon: AdminClient, status: PromptStatus) -> str:
        """Return why no further prompt is to be tried now; empty: go on."""


@dataclass
class _Retry:
    """When a prompt is tried again."""

    due_s: float
    wait_s: float


class Refresher:
    """One thread's.

    Args:
        facts: Of this engine.
        url: Of vLLM's API server.
        is_quiet: Waits a short time until no request of a user is open; says whether that is so.
        compute: Has vLLM compute a prompt.
    """

    def __init__(self, facts: EngineFacts, url: str, is_quiet: Callable[[], bool], compute: Warmer) -> None:
        self._facts, self._url, self._is_quiet, self._compute = facts, url, is_quiet, compute
        self._namespace_id = ""
        self._retries: dict[str, _Retry] = {}  # by pin id, in that namespace
        self._due_s = 0.0
        # Ids of pins whose sources are to be checked, the most important last; None: they are not listed yet. Once:
        # vLLM's template stays what it is.
        self._to_check: list[str] | None = None
        self._rendered: dict[Shape, list[bool]] = {}  # for each source that was checked, whether its tokens changed
        self._num_failed: Counter[Shape] = Counter()  # of those that could not be

    @property
    def is_checked(self) -> bool:
        """All sources were looked at."""
        return self._to_check == []

    def is_due(self) -> bool:
        """Return whether it is time to look again."""
        return time.monotonic() >= self._due_s

    def look(self, daemon: AdminClient, namespace_id: str) -> None:
        """Render and compute what is unfinished, by priority; stop while a user waits, and go on at the next look."""
        self._due_s = time.monotonic() + PERIOD_S  # also if this fails
        try:
            self._check_sources(daemon)
            self._finish(daemon, namespace_id)
        except VllmUnreachableError:
            self._due_s = time.monotonic() + _UNREACHABLE_S
            raise
        self._due_s = time.monotonic() + PERIOD_S

    # Sources that render to other tokens

    def _check_sources(self, daemon: AdminClient) -> None:
        """Render some sources of each shape again; where one gives other tokens, all others of that shape."""
        if self._to_check is None:
            listed = by_importance(filter(self._may_refresh, daemon.list()))
            ids = [each.pin_id for each in listed if each.num_tokens and each.source_digest and not each.replacement]
            self._to_check = ids[::-1]
        while self._to_check and self._is_quiet():
            status, recipe = self._current(daemon, self._to_check[-1])
            if status is not None and recipe is not None and not status.replacement:
                shape = _shape(status, recipe)
                rendered = self._rendered.setdefault(shape, [])
                if any(rendered) or (len(rendered) < _SAMPLES and self._num_failed[shape] < _MAX_FAILED):
                    is_other = self._render(daemon, status, recipe)
                    rendered += [] if is_other is None else [is_other]
                    self._num_failed[shape] += is_other is None
            self._to_check.pop()

    # What has no tokens, or is not stored

    def _finish(self, daemon: AdminClient, namespace_id: str) -> None:
        if namespace_id != self._namespace_id:
            self._namespace_id, self._retries = namespace_id, {}
        unfinished = daemon.list(unfinished=True)
        known, now_s = {status.pin_id for status in unfinished}, time.monotonic()
        self._retries = {
            pin_id: retry
            for pin_id, retry in self._retries.items()
            if pin_id in known or now_s < retry.due_s + _MAX_RETRY_S
        }
        for status in by_importance(filter(self._may_refresh, unfinished)):
            if not self._is_due(status):
                continue
            if not self._is_quiet():
                return
            if not status.num_tokens:
                self._tried(status)
                current, recipe = self._current(daemon, status.pin_id)
                if current is not None and recipe is not None:
                    self._render(daemon, current, recipe)
            elif _is_missing(status, namespace_id):
                self._tried(status)
                logger.info("kvtier refresh: computing name=%s tokens=%d", status.name, status.num_tokens)
                if problem := self._compute(daemon, status):
                    logger.warning("kvtier: refreshing ends for now: %s", problem)
                    return

    def _may_refresh(self, status: PromptStatus) -> bool:
        """Return whether an operator has pinned it, for a model that this engine may serve, and it waits for this."""
        # Of one that is not rendered, the model may be an adapter, which only vLLM's API knows.
        is_served = not status.num_tokens or not status.model or status.model in self._facts.model_names
        is_stuck = bool(status.error) or status.state == PromptStatus.OVER_QUOTA
        is_on_its_way = status.computed_elsewhere and bool(status.num_tokens)
        return status.pinned and is_served and status.origin in _OPERATORS and not is_stuck and not is_on_its_way

    def _is_due(self, status: PromptStatus) -> bool:
        retry = self._retries.get(status.pin_id)
        return retry is None or time.monotonic() >= retry.due_s

    def _tried(self, status: PromptStatus) -> None:
        retry = self._retries.get(status.pin_id)
        wait_s = _RETRY_S if retry is None else min(_MAX_RETRY_S, 2 * retry.wait_s)
        self._retries[status.pin_id] = _Retry(time.monotonic() + wait_s, wait_s)

    def _current(self, daemon: AdminClient, pin_id: str) -> tuple[PromptStatus | None, Recipe | None]:
        """Return a pin as it is now and its source; None for one that has ended, or has no source to render."""
        try:
            status = daemon.get(pin_id=pin_id)
            if not status.pinned or not status.recipe_json:
                return None, None
            recipe = Recipe.from_json(status.recipe_json)
        except DaemonUnreachableError:
            raise
        except KvtierError:
            return None, None
        return status, None if recipe.kind is SourceKind.TOKENS else recipe

    def _render(self, daemon: AdminClient, status: PromptStatus, recipe: Recipe) -> bool | None:
        """Have vLLM render a source; if it gives other tokens than the pin has, pin those.

        Returns:
            Whether it did; None: it could not be tried.

        Raises:
            VllmUnreachableError: vLLM's API server does not answer.
            DaemonUnreachableError: The daemon does not.
        """
        try:
            with VllmClient(self._url, os.environ.get("VLLM_API_KEY") or None) as vllm:
                model = _model_for(status, vllm.models())
                if model is None:
                    return None
                tokens = render(recipe, vllm, model.name).tokens
            if (len(tokens), TokenIds(tokens).digest) == (status.num_tokens, status.tokens_digest):
                return False
            made = daemon.pin(
                PinRequest(
                    name=status.name.rpartition("@")[0] if status.origin == "replacement" else status.name,
                    tokens=tokens,
                    model=model.base,
                    lora_name=model.lora_name,
                    lora_path=model.lora_path,
                    cache_salt=status.cache_salt,
                    recipe_json=recipe.to_json(),
                    replace=True,
                    if_pin_id=status.pin_id,  # it may have been replaced or unpinned while vLLM rendered
                )
            )
            logger.info("kvtier: rendered name=%s tokens=%d by this vLLM", made.name, len(tokens))
        except (VllmUnreachableError, DaemonUnreachableError):
            raise
        except KvtierError as exc:  # this prompt; the others may do
            logger.warning("kvtier: cannot render name=%s: %s", status.name, exc)
            return None
        return True


def _shape(status: PromptStatus, recipe: Recipe) -> Shape:
    kwargs = tuple(sorted((key, str(value)) for key, value in (recipe.chat_template_kwargs or {}).items()))
    return recipe.kind, bool(recipe.tools), kwargs, status.lora_name


def _model_for(status: PromptStatus, models: Sequence[ServedModel]) -> ServedModel | None:
    """Return what vLLM serves for a prompt: its adapter, its base model, or what was named before vLLM ran."""
    if status.lora_name:
        return next((each for each in models if each.lora_name == status.lora_name), None)
    if not status.model:
        return next((each for each in models if not each.lora_path), None)
    named = (each for each in models if each.name == status.model)
    aliased = (each for each in models if each.base == status.model and not each.lora_path)
    return next(named, None) or next(aliased, None)


def _is_missing(status: PromptStatus, namespace_id: str) -> bool:
    """Return whether a prompt is not durable in a namespace that has bound it."""
    own = [binding for binding in status.bindings if binding.namespace_id == namespace_id]
    return any((each.num_host_chunks if each.ephemeral else each.num_durable_chunks) < each.num_chunks for each in own)
