"""Asked at every door: who is it, may they do it, is it too often; and it writes what is to be remembered of it."""

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from kvtier.access.audit_log import AuditLog
from kvtier.access.bearer_tokens import token_of_header
from kvtier.access.caller import Caller, Door, Role
from kvtier.access.grants import GrantBook, GrantRow
from kvtier.access.open_streams import OpenStreams
from kvtier.access.rate_limits import BURST_CALLS, CALLS_PER_S, MAX_WRONG, CallRates, WrongCredentials
from kvtier.errors import MessageTimeoutError, TooManyCallsError, UnauthenticatedError

ANYONE = "anyone"
"""Name of every caller with `access.auth = "none"`."""
REFRESH_S = 0.5
"""Between two looks at the file of grants."""
OK = "ok"
_MAX_NAMES = 20


class Gatekeeper:
    """Any thread, except for `streams` and `end_streams`, which are the loop's of the gRPC server.

    Attributes:
        grants: Who may call.
        needs_credentials: Over TCP and HTTP; False with `access.auth = "none"`.
        audit: Where calls are written down.
        streams: That are open.
        num_unauthenticated: Calls that were refused; so are the three below. Not exact: threads add to them.
    """

    def __init__(
        self,
        grants: GrantBook,
        audit: AuditLog,
        *,
        needs_credentials: bool = True,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Take the grants, and the log, which the caller closes.

        `needs_credentials`: see above.
        """
        self.grants, self.audit = grants, audit
        self.needs_credentials, self._clock, self._wall_clock = needs_credentials, clock, wall_clock
        self.streams = OpenStreams()
        self.num_unauthenticated = self.num_forbidden = self.num_too_many = self.num_silent = 0
        self._wrong, self._rates = WrongCredentials(), CallRates()

    def identify(
        self, door: Door, address: str, *, call: str, authorization: str | None = None, certificate: str | None = None
    ) -> Caller:
        """Return who calls over TCP. A refusal is counted for the address, and written to the audit log.

        Args:
            door: Where the call came in.
            address: From where, without the port.
            call: For the log.
            authorization: The header, if there is one; it counts before the certificate.
            certificate: Common name of the client certificate that TLS has verified, if there is one.

        Raises:
            UnauthenticatedError: No credentials, or none that count.
            TooManyCallsError: The address has sent too many wrong ones. Right ones are let through.
        """
        if not self.needs_credentials:
            # No admin: what has no credentials must not make some.
            return Caller(name=ANYONE, role=Role.OPERATOR, door=door, address=address)
        try:
            return self._grant(authorization, certificate).caller(door, address)
        except UnauthenticatedError as error:
            if self._wrong.add(address, self._clock()):
                self.num_too_many += 1
                # not written down: a line for each would fill the disk
                raise TooManyCallsError(
                    f"more than {MAX_WRONG} calls with wrong credentials came from {address[:64]}; wait a minute, and "
                    "send a token that counts"
                ) from error
            self.num_unauthenticated += 1
            unknown = Caller(name=certificate or "", role=Role.VIEWER, door=door, address=address)
            self.record(unknown, call, type(error).__name__)
            raise

    def _grant(self, authorization: str | None, certificate: str | None) -> GrantRow:
        now_unix_s = self._wall_clock()
        if authorization is not None:
            return self.grants.by_token(token_of_header(authorization), now_unix_s)
        if certificate:
            return self.grants.by_certificate(certificate, now_unix_s)
        raise UnauthenticatedError("the call has no credentials")

    def admit(self, caller: Caller) -> None:
        """Count a call of a caller that came in over TCP or HTTP.

        Raises:
            TooManyCallsError: It makes too many.
        """
        if caller.door is Door.SOCKET:
            return
        key = caller.grant_id or f"{caller.name}\0{caller.address}"
        if not self._rates.take(key, self._clock()):
            raise TooManyCallsError(
                f"{caller.name[:64]} makes more than {CALLS_PER_S:g} calls a second, with bursts of {BURST_CALLS:g}; "
                "make fewer"
            )

    def check_stands(self, caller: Caller) -> None:
        """A call goes on: its message has come, or it is made for one that came in over HTTP.

        Raises:
            UnauthenticatedError: The grant that it came in with is over or revoked.
        """
        if caller.grant_id and not self.grants.is_valid(caller.grant_id, self._wall_clock()):
            self.num_unauthenticated += 1
            raise UnauthenticatedError("the grant of this call has ended")

    def note_silent_stranger(self, address: str, call: str, error: MessageTimeoutError) -> None:
        """Count a call without credentials whose message did not come; written down as seldom as wrong credentials."""
        self.num_silent += 1
        if not self._wrong.add(address, self._clock()):
            unknown = Caller(name="", role=Role.VIEWER, door=Door.GRPC, address=address)
            self.record(unknown, call, type(error).__name__)

    def record(self, caller: Caller, call: str, outcome: str, names: Sequence[str] = ()) -> None:
        """Write a call to the audit log. Never blocks.

        Args:
            caller: Who made it; an empty name: it is not known.
            call: Name of the RPC; of an HTTP call that came to none, method and path.
            outcome: `OK`, or the class of the error.
            names: Of the prompts, the namespace or the grant that it is about.
        """
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(self._wall_clock(), UTC).isoformat(timespec="milliseconds"),
            "caller": caller.name,
            "role": caller.role.value if caller.name else "",
            "owner": caller.owner,
            "grant": caller.grant_id,
            "door": caller.door.value,
            "address": caller.address,
            "call": call[:200],
            "names": [name[:200] for name in names[:_MAX_NAMES]],
            "num_names": len(names),
            "outcome": outcome,
        }
        self.audit.add(entry)

    def end_streams(self) -> None:
        """End the streams of grants that have ended."""
        now_unix_s = self._wall_clock()
        self.streams.end_unless(lambda grant_id: self.grants.is_valid(grant_id, now_unix_s))
