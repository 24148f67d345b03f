"""Who may call a daemon over TCP or HTTP. A field that comes from the protocol has the name of the message's field."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Grant:
    """Who may call, and what.

    Attributes:
        role: `viewer`, `operator` or `admin`.
        owner: Only prompts of this owner exist for it; empty: all do.
        certificate: Common name of the client certificate that it is for; empty: it has a token.
        expires_unix_s: 0: never.
        grant_id: In the audit log; a grant that is revoked and made again has another.
    """

    name: str
    role: str
    owner: str
    certificate: str
    created_unix_s: float
    expires_unix_s: float
    grant_id: str


@dataclass(frozen=True, kw_only=True)
class CreatedGrant:
    """A new grant, and its token, which is kept nowhere; empty with a certificate."""

    grant: Grant
    token: str = field(repr=False)
