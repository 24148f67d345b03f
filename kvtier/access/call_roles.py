"""Which role each call needs: one table, by the names of RPCs in proto/kvtier/v1. What is not in it may be called by no
one; a test compares it with the descriptors.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.access.caller import Caller, Role
from kvtier.errors import ForbiddenError


@dataclass(frozen=True, kw_only=True)
class CallRule:
    """What a call needs.

    Attributes:
        role: The least role.
        changes: It changes something, so it is in the audit log; else only its refusals are.
        for_owners: A caller with an owner may make it; what it does is kept to that owner's prompts by the servicer.
        admin_field: Of the request; a request in which it is set needs the role admin, and changes something.
    """

    role: Role
    changes: bool = False
    for_owners: bool = True
    admin_field: str = ""


_READS = CallRule(role=Role.VIEWER)
_READS_TEXT = CallRule(role=Role.OPERATOR)
_CHANGES = CallRule(role=Role.OPERATOR, changes=True)
_ADMINISTERS = CallRule(role=Role.ADMIN, changes=True, for_owners=False)

CALL_RULES: Mapping[str, CallRule] = {
    # Prompts
    "Pin": _CHANGES,
    "ApplyPrompts": _CHANGES,
    "RenamePrompt": _CHANGES,
    "ListPrompts": _READS,
    "GetPrompt": _READS,  # a viewer's answer has no source and no salt
    "GetTokens": _READS_TEXT,
    "GetChunkMap": _READS,
    "WatchPrompt": _READS,
    "UpdatePrompt": _CHANGES,
    "Unpin": _CHANGES,
    "Evict": CallRule(role=Role.OPERATOR, changes=True, admin_field="all"),
    "Export": _READS_TEXT,
    # A bundle says by which keys its KV is found: so it can be KV of anyone's prompts, and of no owner's alone.
    "Import": CallRule(role=Role.OPERATOR, changes=True, for_owners=False),
    "VerifyPrompt": CallRule(role=Role.OPERATOR, changes=True),  # it drops what is damaged
    # Requests
    "GetAdvice": _READS,  # a viewer's answer has no text of places that change
    "Explain": _READS_TEXT,
    "ListRecentRequests": _READS,
    # The daemon
    "GetStatus": _READS,
    "ListNamespaces": _READS,
    "CheckReady": _READS,
    "WatchEvents": _READS,
    "GetRemote": _READS,
    "Fsck": CallRule(role=Role.OPERATOR, for_owners=False, admin_field="repair"),
    "QuarantineNamespace": _ADMINISTERS,
    "ReleaseNamespace": _ADMINISTERS,
    # Grants
    "CreateGrant": _ADMINISTERS,
    "ListGrants": CallRule(role=Role.ADMIN, for_owners=False),
    "RevokeGrant": _ADMINISTERS,
    # Engines; not at the TCP port, where there is no EngineService
    "Attach": CallRule(role=Role.ADMIN, for_owners=False),
}


def check_call(caller: Caller, call: str) -> CallRule:
    """Return the rule of a call.

    Raises:
        ForbiddenError: The caller may not make it, whatever the request says.
    """
    rule = CALL_RULES.get(call)
    if rule is None:
        raise ForbiddenError(call, caller.name, caller.role, "no role may make this call")
    if not caller.role.includes(rule.role):
        raise ForbiddenError(call, caller.name, caller.role, _needed(rule.role))
    if caller.owner and not rule.for_owners:
        remedy = f"it concerns prompts of all owners, and this is a grant for owner {caller.owner}; use one without"
        raise ForbiddenError(call, caller.name, caller.role, remedy)
    return rule


def is_free_to(caller: Caller, call: str) -> bool:
    """Return whether a caller may make a call whatever its request says, and nothing of it is written down."""
    rule = CALL_RULES.get(call)
    return (
        rule is not None
        and not rule.changes
        and not rule.admin_field
        and caller.role.includes(rule.role)
        and not caller.owner
    )


def check_request(caller: Caller, call: str, request: object) -> bool:
    """Return whether a request changes something; see `check_call` for what is raised for a field of it."""
    rule = CALL_RULES[call]
    if rule.admin_field and getattr(request, rule.admin_field):
        if not caller.role.includes(Role.ADMIN):
            raise ForbiddenError(f"{call} with {rule.admin_field}", caller.name, caller.role, _needed(Role.ADMIN))
        return True
    return rule.changes


def _needed(role: Role) -> str:
    return f"it needs the role {role}; an admin makes a grant of it: kvtier token create NAME --role {role}"
