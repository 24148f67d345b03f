"""The methods of `Client` that say who may call a daemon over TCP or HTTP."""

import builtins
from typing import Literal

from kvtier._pb import cache_pb2 as pb
from kvtier.library.outcome_calls import OutcomeCalls
from kvtier.library.values.conversion import checked_message, from_message
from kvtier.library.values.grant_values import CreatedGrant, Grant

RoleName = Literal["viewer", "operator", "admin"]


class AccessCalls(OutcomeCalls):
    """Make, list and end grants; for admins, and at the daemon's unix socket."""

    def create_grant(
        self, name: str, *, role: RoleName, owner: str = "", ttl_s: int = 0, certificate: str = ""
    ) -> CreatedGrant:
        """Let someone in over TCP or HTTP; durable on return.

        Args:
            name: Of the grant, as prompts are named.
            role: Viewers read, operators change prompts, admins do everything.
            owner: Only prompts of this owner exist for it. Not for admins.
            ttl_s: Seconds until it ends; 0: never.
            certificate: Common name of a client certificate. Empty: a token is made, which is in the answer only.

        Raises:
            GrantExistsError: Another has the name or the certificate.
            GrantsUnusableError: The daemon cannot read or write its grants.
        """
        how = {"role": role, "owner": owner, "ttl_s": ttl_s, "certificate": certificate}
        request = checked_message(pb.CreateGrantRequest, name=name, **how)
        return from_message(CreatedGrant, self._daemon.create_grant(request))

    def grants(self) -> builtins.list[Grant]:
        """Return all grants, by name; none has its token."""
        return [from_message(Grant, each) for each in self._read(self._daemon.grants)]

    def revoke_grant(self, name: str) -> Grant:
        """End a grant, and its streams within a second; durable on return. Returns what it was.

        Raises:
            GrantNotFoundError: There is none of this name.
        """
        return from_message(Grant, self._daemon.revoke_grant(name))
