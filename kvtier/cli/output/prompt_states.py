"""The state of a prompt in words."""

from kvtier.library.values.prompt_summary import is_refused
from kvtier.library.values.public_values import Prompt, PromptState

_STATE_MEANINGS = {
    PromptState.UNRENDERED: "not yet turned into tokens; run `kvtier pin {name}` while vLLM runs",
    PromptState.WAITING: "no vLLM with the kvtier connector has recognized it yet",
    PromptState.CAPTURING: "chunks are stored as vLLM computes them",
    PromptState.DURABLE: "every chunk is on disk and survives kill -9 and reboot",
    PromptState.OVER_QUOTA: "disk.bytes is used up; unpin and evict a prompt, or raise it",
}


def state_name(prompt: Prompt) -> str:
    return "refused" if is_refused(prompt) else prompt.state.replace("_", " ")


def state_meaning(prompt: Prompt) -> str:
    """Return the meaning of the state, and the next step if there is one."""
    if is_refused(prompt):
        return "vLLM cannot use it; `error` says why"
    return _STATE_MEANINGS.get(prompt.state, "").format(name=prompt.name)
