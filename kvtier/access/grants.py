"""Grants: who has which role, by a token's digest or a certificate's name; kept in one file, which may change any time.

access.json in the disk folder, mode 0600, is `{"version": 1, "grants": [{...}]}` with the fields of `GrantRow`. It is
written beside itself and renamed. A file that cannot be read, or that another user may write to, makes every lookup
fail: a mistake in it must not open a door.
"""

import hmac
import json
import logging
import secrets
import stat
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kvtier.access.bearer_tokens import digest_of, is_token, new_token
from kvtier.access.caller import NAME, Caller, Door, Role, check_scope, checked_owner, parse_role
from kvtier.core.limits import TTL_S, Text, check_name
from kvtier.errors import (
    GrantExistsError,
    GrantNotFoundError,
    GrantsUnusableError,
    InvalidArgumentError,
    UnauthenticatedError,
)
from kvtier.folders import trusted_uids
from kvtier.fsync import write_file_durably
from kvtier.obs.log import log_event

logger = logging.getLogger(__name__)

FILE_NAME = "access.json"
MAX_GRANTS = 1000
_MAX_FILE_BYTES = 2 * 1024**2
_VERSION = 1
_CERTIFICATE = Text(128)


@dataclass(frozen=True, kw_only=True)
class GrantRow:
    """One row of the file.

    Attributes:
        grant_id: Random; a grant that is revoked and made again has another.
        sha256: Of the token, in hex; empty: it has a certificate.
        certificate: Common name of a client certificate; empty: it has a token.
        expires_unix_s: 0: never.
    """

    grant_id: str
    name: str
    role: Role
    owner: str = ""
    sha256: str = ""
    certificate: str = ""
    created_unix_s: float = 0.0
    expires_unix_s: float = 0.0

    def is_over(self, now_unix_s: float) -> bool:
        """Return whether its time is over."""
        return 0 < self.expires_unix_s <= now_unix_s

    def caller(self, door: Door, address: str) -> Caller:
        """Return who calls with it."""
        return Caller(
            name=self.name, role=self.role, owner=self.owner, door=door, address=address, grant_id=self.grant_id
        )


@dataclass(frozen=True, kw_only=True)
class WantedGrant:
    """CreateGrantRequest of proto/kvtier/v1/cache.proto, checked.

    Raises:
        InvalidArgumentError: A field cannot be used.
    """

    name: str
    role: Role
    owner: str = ""
    ttl_s: int = 0
    certificate: str = ""

    def __post_init__(self) -> None:
        check_name(self.name)
        checked_owner(self.owner)
        check_scope(self.role, self.owner)
        TTL_S.check("ttl_s", self.ttl_s)
        _CERTIFICATE.check("certificate", self.certificate)


@dataclass(frozen=True)
class _Read:
    """What the file said when it was last read."""

    stamp: tuple[int, ...] | None  # of the file; None: there was none
    grants: tuple[GrantRow, ...]
    problem: str = ""


class GrantBook:
    """All grants. Any thread: what was read is replaced as a whole, never changed."""

    def __init__(self, folder: Path) -> None:
        """Read the file, if there is one. Blocks."""
        self.path = folder / FILE_NAME
        self._write_lock = threading.Lock()
        self._read = _Read((), ())
        self._by_digest: Mapping[str, GrantRow] = {}
        self._by_certificate: Mapping[str, GrantRow] = {}
        self.refresh()

    @property
    def problem(self) -> str:
        """Why no grant counts; empty: they do."""
        return self._read.problem

    def all(self) -> Sequence[GrantRow]:
        """Return the grants, by name.

        Raises:
            GrantsUnusableError: The file cannot be read.
        """
        self._require_readable()
        return self._read.grants

    def by_token(self, token: str, now_unix_s: float) -> GrantRow:
        """Return the grant of a token.

        Raises:
            UnauthenticatedError: There is none, or no longer.
        """
        digest = digest_of(token) if is_token(token) else ""
        # By digest, which no one can choose: how long the lookup takes says nothing of other tokens.
        grant = self._by_digest.get(digest)
        if grant is None or not hmac.compare_digest(grant.sha256, digest):
            self._refuse_if_unreadable()
            raise UnauthenticatedError("the daemon knows no such token: it is wrong, or was revoked")
        return self._valid(grant, "token", now_unix_s)

    def by_certificate(self, common_name: str, now_unix_s: float) -> GrantRow:
        """Return the grant of a client certificate that TLS has verified.

        Raises:
            UnauthenticatedError: There is none, or no longer.
        """
        grant = self._by_certificate.get(common_name)
        if grant is None:
            self._refuse_if_unreadable()
            remedy = f"make one: kvtier token create NAME --role ROLE --certificate {common_name[:64]}; or send a token"
            raise UnauthenticatedError(f"no grant names the client certificate {common_name[:64]!r}", remedy)
        return self._valid(grant, "certificate", now_unix_s)

    def is_valid(self, grant_id: str, now_unix_s: float) -> bool:
        """Return whether a grant stands; while the file cannot be read, none does."""
        return any(each.grant_id == grant_id and not each.is_over(now_unix_s) for each in self._read.grants)

    def create(self, wanted: WantedGrant, now_unix_s: float) -> tuple[GrantRow, str]:
        """Make a grant; durable on return. Blocks.

        Returns:
            The grant, and its token, which is kept nowhere; empty for a certificate.

        Raises:
            GrantExistsError: Another has its name or certificate.
            InvalidArgumentError: There are as many as may be.
            GrantsUnusableError: The file cannot be read or written; nothing has changed.
        """
        token = "" if wanted.certificate else new_token()
        grant = GrantRow(
            grant_id=secrets.token_hex(8),
            name=wanted.name,
            role=wanted.role,
            owner=wanted.owner,
            sha256=digest_of(token) if token else "",
            certificate=wanted.certificate,
            created_unix_s=now_unix_s,
            expires_unix_s=now_unix_s + wanted.ttl_s if wanted.ttl_s else 0.0,
        )
        with self._write_lock:
            known = self._fresh()
            for each in known:
                if each.name == grant.name:
                    raise GrantExistsError("name", grant.name)
                if grant.certificate and each.certificate == grant.certificate:
                    raise GrantExistsError("certificate", grant.certificate)
            if len(known) >= MAX_GRANTS:
                remedy = f"there are {MAX_GRANTS} grants, and no more may be; revoke some: kvtier token revoke"
                raise InvalidArgumentError("name", grant.name, remedy)
            self._write([*known, grant])
        return grant, token

    def revoke(self, name: str) -> GrantRow:
        """End a grant; durable on return. Blocks.

        Raises:
            GrantNotFoundError: There is none of this name.
            GrantsUnusableError: As `create`.
        """
        with self._write_lock:
            known = self._fresh()
            ended = next((each for each in known if each.name == name), None)
            if ended is None:
                raise GrantNotFoundError(name)
            self._write([each for each in known if each is not ended])
        return ended

    def refresh(self) -> bool:
        """Read the file again if it has changed; returns whether it had. Blocks."""
        stamp, problem = _stamp_of(self.path)
        if stamp == self._read.stamp and problem == self._read.problem:
            return False
        read = _Read(stamp, (), problem) if problem or stamp is None else _read(self.path, stamp)
        if read.problem and read.problem != self._read.problem:
            log_event(logger, "grants_unusable", level=logging.ERROR, path=self.path, problem=read.problem)
        elif not read.problem and self._read.problem:
            log_event(logger, "grants_usable_again", path=self.path, grants=len(read.grants))
        # What an old snapshot still grants for a moment is noticed as a change of the file is: within a second.
        self._by_digest = {each.sha256: each for each in read.grants if each.sha256}
        self._by_certificate = {each.certificate: each for each in read.grants if each.certificate}
        self._read = read
        return True

    def _fresh(self) -> list[GrantRow]:
        self.refresh()
        self._require_readable()
        return list(self._read.grants)

    def _write(self, grants: Sequence[GrantRow]) -> None:
        ordered = sorted(grants, key=lambda each: each.name)
        text = json.dumps({"version": _VERSION, "grants": [asdict(each) for each in ordered]}, indent=1) + "\n"
        try:
            write_file_durably(self.path, text.encode())
        except OSError as exc:
            raise GrantsUnusableError(self.path, f"cannot be written: {exc.strerror}") from exc
        finally:
            self.refresh()

    def _require_readable(self) -> None:
        if self._read.problem:
            raise GrantsUnusableError(self.path, self._read.problem)

    def _refuse_if_unreadable(self) -> None:
        """Say to callers that it is not their token that is wrong. They learn no path: they may be anyone."""
        if self._read.problem:
            remedy = f"its administrator finds why in its log (grants_unusable) and mends {FILE_NAME}"
            raise UnauthenticatedError("the daemon cannot read its grants, and refuses everyone", remedy)

    def _valid(self, grant: GrantRow, what: str, now_unix_s: float) -> GrantRow:
        if grant.is_over(now_unix_s):
            remedy = f"make another: kvtier token revoke {grant.name}, then kvtier token create {grant.name}"
            raise UnauthenticatedError(f"the time of this {what}'s grant is over", remedy)
        return grant


def _stamp_of(path: Path) -> tuple[tuple[int, ...] | None, str]:
    """Return what changes when the file does, and why it cannot be trusted."""
    try:
        facts = path.lstat()
    except FileNotFoundError:
        return None, ""
    except OSError as exc:
        return None, f"cannot be looked at: {exc.strerror}"
    stamp = (facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
    if not stat.S_ISREG(facts.st_mode):
        return stamp, "is no regular file"
    if facts.st_uid not in trusted_uids():
        return stamp, f"belongs to uid {facts.st_uid}"
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return stamp, f"may be written by other users (mode {stat.S_IMODE(facts.st_mode):04o}; run chmod 600)"
    return stamp, ""


def _read(path: Path, stamp: tuple[int, ...]) -> _Read:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as exc:
        return _Read(stamp, (), f"cannot be read: {exc.strerror}")
    try:
        return _Read(stamp, _parsed(data))
    except InvalidArgumentError as exc:
        return _Read(stamp, (), f"is damaged: {exc}")
    except (ValueError, RecursionError) as exc:
        return _Read(stamp, (), f"is damaged: {str(exc)[:200]}")


def _parsed(data: bytes) -> tuple[GrantRow, ...]:
    if len(data) > _MAX_FILE_BYTES:
        raise ValueError(f"has more than {_MAX_FILE_BYTES} bytes")
    given: Any = json.loads(data)
    if not isinstance(given, dict) or given.get("version") != _VERSION or not isinstance(given.get("grants"), list):
        raise ValueError(f'must be {{"version": {_VERSION}, "grants": [...]}}')
    if len(given["grants"]) > MAX_GRANTS:
        raise ValueError(f"has more than {MAX_GRANTS} grants")
    grants = tuple(_grant(each) for each in given["grants"])
    for field in ("grant_id", "name", "sha256", "certificate"):
        values = [value for each in grants if (value := getattr(each, field))]
        if len(values) != len(set(values)):
            raise ValueError(f"two grants have the same {field}")
    return tuple(sorted(grants, key=lambda each: each.name))


def _grant(row: Any) -> GrantRow:
    known = {field.name for field in fields(GrantRow)}
    if not isinstance(row, dict) or not {"grant_id", "name", "role"} <= row.keys() <= known:
        raise ValueError(f"a grant must have grant_id, name and role, and nothing beside {', '.join(sorted(known))}")
    sha256, certificate = row.get("sha256", ""), _CERTIFICATE.check("certificate", row.get("certificate", ""))
    if not isinstance(sha256, str) or (sha256 and (len(sha256) != 64 or set(sha256) - set("0123456789abcdef"))):
        raise ValueError("sha256 must be 64 hex digits")
    if bool(sha256) == bool(certificate):
        raise ValueError("a grant must have either sha256 or certificate")
    grant = GrantRow(
        grant_id=NAME.check("grant_id", row["grant_id"]),
        name=check_name(row["name"]),
        role=parse_role(row["role"]),
        owner=checked_owner(row.get("owner", "")),
        sha256=sha256,
        certificate=certificate,
        created_unix_s=_time(row.get("created_unix_s", 0)),
        expires_unix_s=_time(row.get("expires_unix_s", 0)),
    )
    check_scope(grant.role, grant.owner)
    return grant


def _time(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise ValueError("times must be seconds since 1970")
    return float(value)
