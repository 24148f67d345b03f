"""Has a vLLM compare a pinned prompt: its answers with KV from kvtier, and with KV that it computed itself."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.client.warm_requests import warm_tokens
from kvtier.errors import RenderError
from kvtier.library.flows.warm_flow import model_of
from kvtier.library.rendering.vllm_client import VllmClient
from kvtier.library.values.public_values import DaemonStatus, Prompt
from kvtier.verification import (
    Comparison,
    ComparisonVerdict,
    Completion,
    compare_live,
    completion_body,
    read_completion,
)


@dataclass(frozen=True, kw_only=True)
class LiveOutcome:
    """A comparison, and which vLLM made it; see VerifyResult."""

    comparison: Comparison
    vllm_version: str = ""
    model: str = ""
    namespace_ids: tuple[str, ...] = ()


def compare_with(
    vllm: VllmClient, prompt: Prompt, tokens: Sequence[int], status: DaemonStatus, timeout_s: float
) -> LiveOutcome:
    """Compare; a vLLM that does not answer, or refuses, makes the comparison inconclusive.

    Args:
        vllm: Asked for each answer.
        prompt: Recognized by an engine.
        tokens: Its own.
        status: The daemon's, whose sessions say which namespace the vLLM belongs to.
        timeout_s: For one answer.
    """

    def complete(*, model: str, tokens: Sequence[int], cache_salt: str, max_tokens: int) -> Completion:
        body = completion_body(model=model, tokens=tokens, cache_salt=cache_salt, max_tokens=max_tokens)
        return read_completion(vllm.complete(body, timeout_s))

    if not prompt.num_confirmed:
        return _inconclusive("no attached vLLM has recognized the prompt, so none can be restored it")
    live = {binding.namespace_id for binding in prompt.bindings if binding.live}
    if stopped := [each for each in status.namespaces if each.namespace_id in live and each.quarantine_reason]:
        return _inconclusive(f"the namespace is quarantined, so nothing is restored: {stopped[0].quarantine_reason}")
    try:
        models, version = vllm.models(), vllm.version()
        served = model_of(prompt, models)
        if served is None:
            names = ", ".join(model.name for model in models)
            wanted = prompt.lora_name or prompt.model or "any model"
            return _inconclusive(f"{vllm.url} serves {names or 'nothing'}, not {wanted}")
        comparison = compare_live(
            complete, model=served.name, tokens=warm_tokens(prompt, tokens), own_salt=prompt.cache_salt
        )
    except RenderError as exc:
        return _inconclusive(str(exc))
    namespace_ids = _namespaces_of(prompt, status, {served.name, served.base})
    return LiveOutcome(
        comparison=comparison, vllm_version=version, model=served.name, namespace_ids=tuple(sorted(namespace_ids))
    )


def _namespaces_of(prompt: Prompt, status: DaemonStatus, model_names: set[str]) -> set[str]:
    """Return the namespaces that the asked vLLM may belong to: those of engines that serve the model."""
    live = {binding.namespace_id for binding in prompt.bindings if binding.live}
    serving = {each.namespace_id for each in status.sessions if model_names & set(each.model_names)}
    return live & serving or live


def _inconclusive(why: str) -> LiveOutcome:
    return LiveOutcome(comparison=Comparison(verdict=ComparisonVerdict.INCONCLUSIVE, why=why))
