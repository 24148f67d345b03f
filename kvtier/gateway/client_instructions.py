"""What a client itself asks of kvtier in `kv_transfer_params`: found in any request, checked, put in the caller's name.

vLLM reads a body as Python's `json` does: characters may be escaped, and text may be UTF-16 or UTF-32. So both are
looked for here. An instruction that this process did not find would name an owner of the client's choice.
"""

import re
from collections.abc import Sequence
from typing import Any

from kvtier.core.requests.request_instructions import PARAMETER, read_instructions
from kvtier.errors import InvalidArgumentError
from kvtier.gateway.asgi import Headers, Message, Receive
from kvtier.gateway.markers.marked_request import Json, MarkerError

_BREAKPOINTS: Json = {"breakpoints": [{"num_tokens": 1, "ttl_s": 1}]}  # what markers add, while it is not known yet
_PLAIN_KEY = f'"{PARAMETER}"'.encode()
_KEY = re.compile(rb'"' + b"".join(rb"(?:%c|\\u00(?i:%02x))" % (code, code) for code in PARAMETER.encode()) + rb'"')
_LONGEST_KEY_BYTES = 2 + 6 * len(PARAMETER)
_PARAMS = "kv_transfer_params"
_ENGINE_PATH = ("sampling_params", "extra_args", _PARAMS, PARAMETER)
"""Where vLLM itself puts an instruction, and `/inference/v1/generate` takes it from clients."""


class UnreadInstructionError(Exception):
    """A body that is too long to be read may hold an instruction."""


def may_be_json(headers: Headers) -> bool:
    """Return whether vLLM may read a body of these headers as JSON."""
    kinds = [value.lower() for name, value in headers if name.lower() == b"content-type"]
    return not kinds or any(b"json" in kind for kind in kinds)


def may_instruct(body: bytes) -> bool:
    """Return whether a body, or a part of one, may hold an instruction; without parsing it.

    JSON in UTF-8 has no NUL, and in the other encodings every second byte or more is one.
    """
    return _PLAIN_KEY in body or b"\0" in body or (b"\\u00" in body and _KEY.search(body) is not None)


def guarded(receive: Receive) -> Receive:
    """Return a `receive` that raises UnreadInstructionError where a body may hold an instruction."""
    end = b""

    async def receive_guarded() -> Message:
        nonlocal end
        message = await receive()
        seen = end + message.get("body", b"")
        if may_instruct(seen):
            raise UnreadInstructionError
        end = seen[1 - _LONGEST_KEY_BYTES :]
        return message

    return receive_guarded


def checked_instruction(body: Json, owner: str, *, is_marked: bool) -> Json | None:
    """Return what the client itself asks of kvtier, in the caller's name; None when it asks nothing.

    Raises:
        MarkerError: It cannot be carried out.
    """
    if _at(body, _ENGINE_PATH) is not None:
        raise MarkerError(_ENGINE_PATH, f"write it into {_PARAMS}.{PARAMETER}, at the top of the request")
    own = _at(body, (_PARAMS, PARAMETER))
    if own is None:
        return None
    named: Json = {}
    if isinstance(own, dict):
        named = {key: own[key] for key in own if key != "owner"} | ({"owner": owner} if owner else {})
    try:
        read_instructions((named | _BREAKPOINTS if is_marked else named) if isinstance(own, dict) else own)
    except InvalidArgumentError as exc:
        raise MarkerError(tuple(exc.field.split(".")), str(exc).removeprefix(f"{exc.field} = ")) from exc
    return named


def _at(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value
