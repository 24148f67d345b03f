"""How much requests may have pinned: each owner, and all owners together. Decisions only."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvtier.config.units import format_size
from kvtier.errors import RequestLimitError
from kvtier.prompts.quota import Usage

_MAX_OWNERS = 4096
"""Owners whose rate is known, 1 MB; one that is forgotten begins with a full rate again, within that of all."""


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """What may be pinned, and how much of it newly in a minute."""

    num_pins: int
    num_tokens: int
    num_bytes: int
    new_per_minute: int


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """The allowance of each owner, and that of all together.

    No settings: they bound what clients can do to the machine, and what a pin costs does not depend on the machine,
    except its bytes, which are a share of `disk.bytes`.
    """

    owner: Allowance
    total: Allowance

    @classmethod
    def of_disk(cls, disk_bytes: int) -> "RequestLimits":
        """Return the limits for a disk tier of this size.

        A token of a pin takes 4 bytes in the daemon, and 20 in each engine, which knows its chunks: 2**24 tokens are
        64 MiB and 320 MiB. A new pin is a transaction with two fsyncs, and tokens to each engine: 600 a minute keep a
        disk busy for some percent. One owner gets at most half of all, so that one client does not shut out the others.
        """
        total = Allowance(num_pins=4096, num_tokens=2**24, num_bytes=disk_bytes // 2, new_per_minute=600)
        share = Allowance(
            num_pins=total.num_pins // 4,
            num_tokens=total.num_tokens // 2,
            num_bytes=total.num_bytes // 2,
            new_per_minute=total.new_per_minute // 2,
        )
        return cls(owner=share, total=total)


@dataclass(frozen=True)
class _Rate:
    """New pins that may be made at once, as of a moment; refilled evenly up to those of a minute."""

    left: float
    at_s: float

    def at(self, now_s: float, per_minute: int) -> "_Rate":
        refilled = self.left + max(0.0, now_s - self.at_s) * per_minute / 60
        return _Rate(min(float(per_minute), refilled), now_s)


class RequestGate:
    """Says whether another pin may be made. What is counted is of bounded size, however many owners there are."""

    def __init__(self, limits: RequestLimits) -> None:
        self.limits = limits
        self._total = _Rate(limits.total.new_per_minute, 0.0)
        self._owners: OrderedDict[str, _Rate] = OrderedDict()

    def check_rate(self, owner: str, now_s: float) -> None:
        """Raise RequestLimitError if the owner, or all together, made as many pins lately as they may."""
        for whose, rate, limit in self._rates(owner, now_s):
            if rate.left < 1:
                raise RequestLimitError(
                    f"{whose} made {limit} new pins within a minute, which is the most; send fewer markers, or the same"
                )

    def count_new(self, owner: str, now_s: float) -> None:
        """A pin is made."""
        (_, own, _), (_, total, _) = self._rates(owner, now_s)
        self._owners[owner] = replace(own, left=own.left - 1)
        self._owners.move_to_end(owner)
        self._total = replace(total, left=total.left - 1)
        if len(self._owners) > _MAX_OWNERS:
            self._owners.popitem(last=False)

    def _rates(self, owner: str, now_s: float) -> Iterable[tuple[str, _Rate, int]]:
        each, total = self.limits.owner.new_per_minute, self.limits.total.new_per_minute
        own = self._owners.get(owner, _Rate(each, now_s))
        return (shown_owner(owner), own.at(now_s, each), each), ("all owners", self._total.at(now_s, total), total)

    def check_usage(self, owner: str, own: Usage, total: Usage, num_tokens: int, num_bytes: int) -> None:
        """Raise RequestLimitError if one pin more, of these tokens and bytes, would be too much.

        Args:
            owner: Who asks.
            own: What the owner has pinned.
            total: What all owners have.
            num_tokens: Of the pin that is asked for.
            num_bytes: Of it on disk, as estimated.
        """
        for whose, used, most in (
            (shown_owner(owner), own, self.limits.owner),
            ("all owners", total, self.limits.total),
        ):
            if used.num_pins + 1 > most.num_pins:
                raise RequestLimitError(f"{whose} has {used.num_pins} of {most.num_pins} pins; wait until some end")
            if used.num_tokens + num_tokens > most.num_tokens:
                raise RequestLimitError(
                    f"{whose} has {used.num_tokens} of {most.num_tokens} pinned tokens, and asks for {num_tokens} "
                    "more; wait until some pins end"
                )
            if used.num_bytes + num_bytes > most.num_bytes:
                raise RequestLimitError(
                    f"{whose} has {format_size(used.num_bytes)} of {format_size(most.num_bytes)} pinned, and asks for "
                    f"{format_size(num_bytes)} more; wait until some pins end, or raise disk.bytes"
                )


def shown_owner(owner: str) -> str:
    """Return an owner for a message."""
    return f"owner {owner}" if owner else "the owner of requests without owner"
