"""What follows a marker inside a conversation, so that the prompts of its variants differ right behind it.

| marked | variants |
|---|---|
| a part of a user's or a tool's turn | a part follows, and nothing else; an answer and another turn follow |
| the last part of what the system says | one user's turn follows; another one; what follows it in the request |
| an earlier part of it | a user's turn follows; a part and another user's turn follow |
| a turn that can hold no more parts | as for the last part of what the system says |
| a part of an answer | a user's turn follows; a part and another user's turn follow |

The marked turn is the last one in one variant, and not in another: some templates write tools before the last user's
turn, or drop the reasoning of earlier answers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvtier.gateway.markers.marked_request import PROBES, Json

SYSTEM_ROLES = ("system", "developer")
_FIRST, _SECOND = PROBES
# The part of an answer has another name in the Responses API.
_PART_TYPES = {"input_text": "input_text", "output_text": "output_text"}

Turns = list[Json]


def user_turn(text: str) -> Json:
    """Return a user's turn."""
    return {"role": "user", "content": text}


def answer(text: str) -> Json:
    """Return a turn of the model."""
    return {"role": "assistant", "content": text}


def continued(
    turns: Sequence[Json], index: int, cut: Json, longer: Json, *, is_last_system_part: bool = False
) -> list[Turns]:
    """Return the conversations to render for a marker.

    Args:
        turns: Of the request.
        index: Of the marked turn.
        cut: The marked turn up to the marker.
        longer: The same with a probe behind the marker; equal to `cut` where it cannot hold one.
        is_last_system_part: No more system text follows the marker.
    """
    role, before, following = cut.get("role"), turns[:index], list(turns[index + 1 : index + 2])
    if is_last_system_part or longer == cut:
        conversations = [[*before, cut, user_turn(probe)] for probe in PROBES]
        if not following or role_of(following[0]) != "user":  # its opening is not a user's
            conversations.append([*before, cut, *following])
        return conversations
    if role in SYSTEM_ROLES or role == "assistant":
        return [[*before, cut, user_turn(_SECOND)], [*before, longer, user_turn(_FIRST)]]
    return [[*before, cut, answer(_FIRST), user_turn(_SECOND)], [*before, longer]]


def role_of(turn: Any) -> str:
    """Return the role of a turn, or the kind of an item that has none."""
    return str(turn.get("role") or turn.get("type")) if isinstance(turn, Mapping) else ""


def cut_content(turn: Json, index: int | None) -> tuple[Json, Json]:
    """Return a turn up to a part of its content, or with all of it, and the same with a probe behind.

    Args:
        turn: Its content is text or a list of parts.
        index: Of the marked part; None marks the turn as a whole.
    """
    content = turn.get("content")
    if isinstance(content, str):
        return turn, turn | {"content": f"{content}\n{_FIRST}"}
    if not isinstance(content, list) or not content:
        return turn, turn
    kept = content if index is None else content[: index + 1]
    return turn | {"content": kept}, turn | {"content": [*kept, _text_part(kept[-1])]}


def _text_part(beside: Any) -> Json:
    kind = beside.get("type") if isinstance(beside, Mapping) else None
    if isinstance(kind, str) and kind.startswith("input_"):
        kind = "input_text"
    return {"type": _PART_TYPES.get(str(kind), "text"), "text": _FIRST}
