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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier._pb.cache_pb2 import PinRequest, PromptStatus
from kvtier.client.admin import AdminClient
from kvtier.client.warm_requests import by_importance
from kvtier.core.tokens import TokenIds
from kvtier.errors import KvtierError, RenderError
from kvtier.library.rendering.recipe import Recipe, SourceKind
from kvtier.library.rendering.render import render
from kvtier.library.rendering.vllm_client import VllmClient, VllmUnreachableError
from kvtier_connector.engine.facts import EngineFacts

logger = logging.getLogger(__name__)

PERIOD_S = 5.0
"""Between two looks at what is unfinished."""
_RETRY_S, _MAX_RETRY_S = 10.0, 600.0
"""After an attempt at a prompt that did not finish it; twice as long after each further one."""
_SAMPLES = 2
"""Of the sources of one shape that are rendered to see whether they still render to their tokens."""
_OPERATORS = ("named", "replacement")


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
        is_quiet: Waits a short time until no request of a user is open; says whether that is so.
        compute: Has vLLM compute a prompt.
    """

    def __init__(self, facts: EngineFacts, is_quiet: Callable[[], bool], compute: Warmer) -> None:
        self._facts, self._is_quiet, self._compute = facts, is_quiet, compute
        self._retries: dict[str, _Retry] = {}  # by pin id
        self._due_s = 0.0
        self._is_checked = False  # whether sources render to their tokens: once, vLLM's template stays what it is

    def is_due(self) -> bool:
        """Return whether it is time to look again."""
        return time.monotonic() >= self._due_s

    def _check_sources(self, daemon: AdminClient, prompts: Iterable[PromptStatus]) -> None:
        """Render some sources of each shape again; where one gives other tokens, render all of that shape.

        Args:
            prompts: Those that the daemon has.
        """
        shapes: dict[tuple[object, ...], list[tuple[PromptStatus, Recipe]]] = {}
        for status in by_importance(filter(self._may_refresh, prompts)):
            if status.num_tokens and (recipe := _recipe_of(daemon, status)) is not None:
                shapes.setdefault(_shape(status, recipe), []).append((status, recipe))
        with self._vllm() as vllm:
            for members in shapes.values():
                samples = [self._render_again(daemon, vllm, *each) for each in members[:_SAMPLES]]
                for each in members[_SAMPLES:] if any(samples) else ():
                    self._render_again(daemon, vllm, *each)

    def look(self, daemon: AdminClient, namespace_id: str) -> None:
        """Render and compute what is unfinished, by priority."""
        self._due_s = time.monotonic() + PERIOD_S  # also if this fails
        if not self._is_checked:
            self._check_sources(daemon, daemon.list())
            self._is_checked = True
        unfinished = daemon.list(unfinished=True)
        due = [status for status in by_importance(filter(self._may_refresh, unfinished)) if self._is_due(status)]
        known = {status.pin_id for status in unfinished}
        self._retries = {pin_id: retry for pin_id, retry in self._retries.items() if pin_id in known}
        for status in due:
            if not self._is_quiet():
                break
            if not status.num_tokens:
                self._render_first(daemon, status)
            elif _is_missing(status, namespace_id):
                logger.info("kvtier refresh: computing name=%s tokens=%d", status.name, status.num_tokens)
                if problem := self._compute(daemon, status):
                    logger.warning("kvtier: refreshing ends for now: %s", problem)
                    break
                self._tried(status)
        self._due_s = time.monotonic() + PERIOD_S

    def _may_refresh(self, status: PromptStatus) -> bool:
        """Return whether an operator has pinned it, for a model of this engine."""
        is_served = not status.model or status.model in self._facts.model_names
        return status.pinned and is_served and status.origin in _OPERATORS and not status.error

    def _is_due(self, status: PromptStatus) -> bool:
        retry = self._retries.get(status.pin_id)
        return retry is None or time.monotonic() >= retry.due_s

    def _tried(self, status: PromptStatus) -> None:
        retry = self._retries.get(status.pin_id)
        wait_s = _RETRY_S if retry is None else min(_MAX_RETRY_S, 2 * retry.wait_s)
        self._retries[status.pin_id] = _Retry(time.monotonic() + wait_s, wait_s)

    def _vllm(self) -> VllmClient:
        assert self._facts.settings.warm_url is not None
        return VllmClient(self._facts.settings.warm_url, os.environ.get("VLLM_API_KEY") or None)

    def _render_first(self, daemon: AdminClient, status: PromptStatus) -> None:
        """Give a prompt that was registered as a source its tokens; the daemon then sends it to its engines."""
        self._tried(status)
        recipe = _recipe_of(daemon, status)
        if recipe is None:
            return
        with self._vllm() as vllm:
            self._render(daemon, vllm, status, recipe)

    def _render_again(self, daemon: AdminClient, vllm: VllmClient, status: PromptStatus, recipe: Recipe) -> bool:
        """Return whether a source gives other tokens than those that are pinned; then they get a version."""
        return self._is_quiet() and self._render(daemon, vllm, status, recipe)

    def _render(self, daemon: AdminClient, vllm: VllmClient, status: PromptStatus, recipe: Recipe) -> bool:
        try:
            model = next((each for each in vllm.models() if _is_for(each.name, each.lora_name, status)), None)
            if model is None:
                return False
            tokens = render(recipe, vllm, model.name).tokens
            if (len(tokens), TokenIds(tokens).digest) == (status.num_tokens, status.tokens_digest):
                return False
            name = status.name.rpartition("@")[0] if status.origin == "replacement" else status.name
            request = PinRequest(
                name=name,
                tokens=tokens,
                model=model.base,
                lora_name=model.lora_name,
                lora_path=model.lora_path,
                cache_salt=status.cache_salt,
                recipe_json=recipe.to_json(),
                replace=True,
            )
            made = daemon.pin(request)
            logger.info("kvtier: rendered name=%s tokens=%d by this vLLM", made.name, len(tokens))
        except VllmUnreachableError:
            raise
        except (RenderError, KvtierError) as exc:  # this prompt; the others may do
            logger.warning("kvtier: cannot render name=%s: %s", status.name, exc)
            return False
        return True


def _recipe_of(daemon: AdminClient, status: PromptStatus) -> Recipe | None:
    """Return a prompt's source; None if it has none that can be rendered, or has ended meanwhile."""
    if not status.source_digest:
        return None
    try:
        recipe = Recipe.from_json(daemon.get(pin_id=status.pin_id).recipe_json)
    except KvtierError:
        return None
    return None if recipe.kind is SourceKind.TOKENS else recipe


def _shape(status: PromptStatus, recipe: Recipe) -> tuple[object, ...]:
    kwargs = tuple(sorted((key, str(value)) for key, value in (recipe.chat_template_kwargs or {}).items()))
    return recipe.kind, bool(recipe.tools), kwargs, status.lora_name


def _is_for(name: str, lora_name: str, status: PromptStatus) -> bool:
    return lora_name == status.lora_name and (bool(lora_name) or status.model in ("", name) or not status.lora_name)


def _is_missing(status: PromptStatus, namespace_id: str) -> bool:
    """Return whether some chunk of a prompt is not on disk in a namespace that has bound it."""
    own: Sequence[int] = [
        binding.num_chunks - binding.num_durable_chunks
        for binding in status.bindings
        if binding.namespace_id == namespace_id
    ]
    return any(own)
