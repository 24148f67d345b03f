"""Who calls: a name, a role, an owner or none; found at the door, read by the servicers, sent on by the HTTP server."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvtier.core.limits import Text, check_operators_owner
from kvtier.errors import InvalidArgumentError

ACTING_FOR_KEY = "kvtier-acting-for"
"""Metadata of a call over the unix socket: for whom it is made, as `acting_for_text` writes it."""
NAME = Text(128, may_be_empty=False)
"""Of a caller: a grant's name, or a certificate's."""
_ADDRESS = Text(256)
_MAX_ACTING_FOR_BYTES = 2048


class Role(StrEnum):
    """What a caller may do; each role may also do what the ones before it may."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    def includes(self, other: "Role") -> bool:
        """Return whether this role may do what the other may."""
        order = list(Role)
        return order.index(self) >= order.index(other)


class Door(StrEnum):
    """Where a call came in."""

    SOCKET = "socket"
    GRPC = "grpc"
    HTTP = "http"


@dataclass(frozen=True, kw_only=True)
class Caller:
    """On whose behalf a call is made.

    Attributes:
        name: The grant's; `local` for a process at the unix socket.
        owner: Only prompts of this owner exist for the caller; empty: all do.
        door: Where the call came in.
        address: From where, as people write it; empty at the unix socket.
        grant_id: Of the grant; its end ends the caller's streams. Empty: none, so nothing ends them.
    """

    name: str
    role: Role
    owner: str = ""
    door: Door = Door.SOCKET
    address: str = ""
    grant_id: str = ""

    def may_see(self, owner: str | None) -> bool:
        """Return whether a prompt of this owner exists for the caller; None: it is not known whose it is."""
        return self.owner in ("", owner)

    @property
    def sees_text(self) -> bool:
        """The caller may read sources, token ids, salts and bundles of prompts, and their text in advice."""
        return self.role.includes(Role.OPERATOR)


LOCAL = Caller(name="local", role=Role.ADMIN)
"""A process that may open the unix socket."""

_current: ContextVar[Caller] = ContextVar("kvtier_caller", default=LOCAL)
_acting_for: ContextVar[Caller | None] = ContextVar("kvtier_acting_for", default=None)


def current_caller() -> Caller:
    """Return who makes the call that runs; `LOCAL` outside of one. For the servicers."""
    return _current.get()


def enter_call(caller: Caller) -> None:
    """Make `current_caller` return this caller, until the task ends. A task serves one call."""
    _current.set(caller)


@contextmanager
def acting_for(caller: Caller) -> Iterator[None]:
    """Have the calls that this thread or task makes to a daemon during the block be made for a caller.

    It counts over the unix socket only, where the daemon takes its word: role and owner can only be less than those of
    a process at the socket, which may do everything. `asyncio.to_thread` takes it along; other threads do not.
    """
    token = _acting_for.set(caller)
    try:
        yield
    finally:
        _acting_for.reset(token)


def acting_for_metadata() -> tuple[tuple[str, str], ...] | None:
    """Return the metadata of a call that is made now over the unix socket; None: it is made for no one else."""
    caller = _acting_for.get()
    return None if caller is None else ((ACTING_FOR_KEY, acting_for_text(caller)),)


def acting_for_text(caller: Caller) -> str:
    """Return a caller as JSON in ASCII, which metadata of gRPC can hold."""
    return json.dumps(
        {
            "name": caller.name,
            "role": caller.role.value,
            "owner": caller.owner,
            "door": caller.door.value,
            "address": caller.address,
            "grant_id": caller.grant_id,
        }
    )


def parse_acting_for(text: str) -> Caller:
    """Return the caller for whom a call over the unix socket is made.

    Raises:
        InvalidArgumentError: It is none: then nothing is done, rather than done as an admin.
    """
    if len(text) > _MAX_ACTING_FOR_BYTES:
        raise InvalidArgumentError(ACTING_FOR_KEY, f"{len(text)} bytes", f"use at most {_MAX_ACTING_FOR_BYTES}")
    try:
        given: Any = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise InvalidArgumentError(ACTING_FOR_KEY, text, "must be a JSON object with name and role") from exc
    known = {"name", "role", "owner", "door", "address", "grant_id"}
    if not isinstance(given, dict) or not {"name", "role"} <= given.keys() <= known:
        raise InvalidArgumentError(ACTING_FOR_KEY, text, f"must be a JSON object of {', '.join(sorted(known))}")
    caller = Caller(
        name=NAME.check("name", given["name"]),
        role=parse_role(given["role"]),
        owner=checked_owner(given.get("owner", "")),
        door=_door(given.get("door", Door.HTTP.value)),
        address=_ADDRESS.check("address", given.get("address", "")),
        grant_id=_ADDRESS.check("grant_id", given.get("grant_id", "")),
    )
    check_scope(caller.role, caller.owner)
    return caller


def parse_role(value: object) -> Role:
    """Return the role; InvalidArgumentError names those that there are."""
    try:
        return Role(value)  # type: ignore[arg-type]
    except ValueError as exc:
        raise InvalidArgumentError("role", value, f"use one of {', '.join(Role)}") from exc


def checked_owner(value: object) -> str:
    """Return an owner's name; InvalidArgumentError for what is none."""
    if not isinstance(value, str):
        raise InvalidArgumentError("owner", value, "must be text")
    return check_operators_owner("owner", value)


def check_scope(role: Role, owner: str) -> None:
    """Raise InvalidArgumentError for an admin with an owner: what admins do is done to prompts of all owners."""
    if owner and role is Role.ADMIN:
        remedy = "an admin has no owner: what admins do is done to all prompts; use viewer or operator, or no owner"
        raise InvalidArgumentError("owner", owner, remedy)


def _door(value: object) -> Door:
    try:
        return Door(value)  # type: ignore[arg-type]
    except ValueError as exc:
        raise InvalidArgumentError("door", value, f"use one of {', '.join(Door)}") from exc
