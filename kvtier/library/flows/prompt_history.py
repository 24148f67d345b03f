"""The versions of a prompt, and the way back to one."""

import time
from collections.abc import Sequence

from kvtier._pb.cache_pb2 import PinRequest
from kvtier.client.admin import AdminClient
from kvtier.concurrency.pauses import POLL_S
from kvtier.core.limits import parse_version
from kvtier.errors import InvalidArgumentError
from kvtier.library.flows.pin_flow import await_replacement
from kvtier.library.progress_events import OnProgress, ReplacementDropped
from kvtier.library.values.conversion import checked_message, prompt_of
from kvtier.library.values.public_values import Prompt, PromptState

BIND_TIMEOUT_S = 5.0
"""For engines to recognize the version, and so learn that its chunks are there."""


def versions_of(client: AdminClient, name: str) -> list[Prompt]:
    """Return a prompt and its other versions: the old ones, the prompt if there is one, its replacement."""
    listed = {each.name: prompt_of(each) for each in client.list()}
    found = [(parse_version(each.name), each) for each in listed.values()]
    others = sorted(
        ((version[1], each) for version, each in found if version and version[0] == name), key=lambda other: other[0]
    )
    # The call says that there is none.
    current = listed.get(name) if others else prompt_of(client.get(name))
    replacement = "" if current is None else current.replacement
    old = [each for _, each in others if each.name != replacement]
    return [*old, *([current] if current else []), *(each for _, each in others if each.name == replacement)]


def last_version(name: str, versions: Sequence[Prompt], field: str = "name") -> int:
    """Return the number of the newest old version. InvalidArgumentError: there is none; `field` names the argument."""
    old = [each for each in versions if each.name != name and not each.pinned]
    version = parse_version(old[-1].name) if old else None
    if version is None:
        raise InvalidArgumentError(field, name, "has no old version that is known; see kvtier history")
    return version[1]


def roll_back(client: AdminClient, name: str, number: int, on_progress: OnProgress) -> Prompt:
    """Replace a prompt with one of its versions, and wait as long as its chunks are there; return what was made.

    Raises:
        InvalidArgumentError: No version has this number.
    """
    if number < 1:
        raise InvalidArgumentError("version", number, "give the number of a version, from 1 on; see kvtier history")
    made = prompt = prompt_of(client.pin(checked_message(PinRequest, name=name, version=number, replace=True)))
    ends_s = time.monotonic() + BIND_TIMEOUT_S
    while _is_awaited(prompt, name) and time.monotonic() < ends_s:
        time.sleep(POLL_S)
        prompt = prompt_of(client.get(pin_id=made.pin_id))
    return await_replacement(client, made.name, prompt, on_progress)


def drop_replacement(client: AdminClient, current: Prompt, on_progress: OnProgress) -> Prompt:
    """End the version that waits to replace a prompt; return the prompt, which stays as it is."""
    client.unpin(current.replacement)
    on_progress(ReplacementDropped(name=current.name, version=current.replacement))
    return prompt_of(client.get(current.name))


def _is_awaited(prompt: Prompt, name: str) -> bool:
    is_made = prompt.name == name or prompt.state is PromptState.DURABLE
    return bool(prompt.num_engines) and not (is_made or prompt.error)
