"""The state of a prompt in words."""

from kvtier.library.values.public_values import Prompt, PromptState

_STATE_MEANINGS = {
    PromptState.UNRENDERED: "not turned into tokens yet: a vLLM with `warm_url` does that, or `kvtier pin {name}` "
    "while vLLM runs",
    PromptState.WAITING: "no vLLM with the kvtier connector has recognized it yet",
    PromptState.CAPTURING: "chunks are stored as vLLM computes them",
    PromptState.DURABLE: "every chunk is on disk and survives kill -9 and reboot",
    PromptState.STALE: "durable for engines of before; those attached now have other weights, another dtype or block "
    "size. A vLLM with `warm_url` computes it again while it has nothing else to do, or `kvtier warm {name}` now",
    PromptState.REFRESHING: "computed again for the engines that are attached now; `stale` until that began",
    PromptState.OVER_QUOTA: "disk.bytes is used up, or the file system full; unpin and evict a prompt, or free space",
    PromptState.REFUSED: "vLLM cannot use it: {error}",
}


def state_name(prompt: Prompt) -> str:
    return prompt.state.replace("_", " ")


def state_meaning(prompt: Prompt) -> str:
    """Return the meaning of the state, and the next step if there is one."""
    return _STATE_MEANINGS.get(prompt.state, "").format(name=prompt.name, error=prompt.error)
