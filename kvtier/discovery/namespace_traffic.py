"""What requests of one namespace begin with: the counts, the automatic pins in use, and places that change."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.core import limits
from kvtier.discovery.choices import PinnedPrefix, PrefixChoice, Selection
from kvtier.discovery.prefix_sketch import PrefixSketch
from kvtier.discovery.seen import SeenRequest

HALF_LIFE_S = 24 * 3600.0
"""A request of yesterday counts half: prompts of daily jobs are still known, those of last week are forgotten."""
MAX_PLACES = 64


@dataclass(kw_only=True)
class PinUse:
    """What an automatic pin was good for.

    Attributes:
        name: Of the prompt.
        prefix: In terms of the sketch.
        num_requests: That began with it, and with no longer automatic pin.
        saved_tokens: That these did not compute, or would not have to: vLLM's own prefix cache may have had them.
        saved_s: Seconds of prefill for these, at the rate of that time.
        last_used_unix_s: When the last request began with it.
    """

    name: str
    prefix: PinnedPrefix
    num_requests: int = 0
    saved_tokens: int = 0
    saved_s: float = 0.0
    last_used_unix_s: float = 0.0

    def add(self, num_tokens: int, prefill_tokens_per_s: float, now_unix_s: float) -> None:
        """A request began with it."""
        self.num_requests += 1
        self.saved_tokens += num_tokens
        self.saved_s += num_tokens / prefill_tokens_per_s
        self.last_used_unix_s = now_unix_s


@dataclass(frozen=True, kw_only=True)
class ChangingPlace:
    """ChangingMiddle of proto/kvtier/v1/engine.proto, checked; `seen_unix_s`: when it was last reported."""

    digest: bytes
    num_stable_tokens: int
    num_tokens: int
    num_prompts: int
    before: str = field(repr=False)
    examples: tuple[str, ...] = field(repr=False)
    seen_unix_s: float

    @classmethod
    def checked(
        cls,
        *,
        digest: bytes,
        num_stable_tokens: int,
        num_tokens: int,
        num_prompts: int,
        before: str,
        examples: Sequence[str],
        seen_unix_s: float,
    ) -> "ChangingPlace":
        """Return the place; InvalidArgumentError names the field that cannot be."""
        if digest:
            limits.check_digest("changing_middle.digest", digest)
        tokens = limits.Whole(0, limits.MAX_TOKENS)
        limits.check_count("changing_middle.examples", len(examples), limits.MAX_PLACE_EXAMPLES)
        return cls(
            digest=digest,
            num_stable_tokens=tokens.check("changing_middle.num_stable_tokens", num_stable_tokens),
            num_tokens=tokens.check("changing_middle.num_tokens", num_tokens),
            num_prompts=limits.NUM_PROMPTS.check("changing_middle.num_prompts", num_prompts),
            before=limits.PLACE_TEXT.check("changing_middle.before", before),
            examples=tuple(limits.PLACE_EXAMPLE.check("changing_middle.examples", each) for each in examples),
            seen_unix_s=seen_unix_s,
        )


@dataclass
class NamespaceTraffic:
    """Of one namespace. Loop thread only.

    Attributes:
        sketch: How often which prefix came.
        uses: Automatic pins of this namespace, by digest.
        covered: Prefixes that a pin with a name keeps, and its id: they need no pin of their own.
        refused_until_s: Prefixes that could not be pinned, and until when that is not tried again.
        places: Of prompts that differ there, by where they begin to.
        selection: The last one.
        wanted: Digests whose tokens engines shall send.
        is_changed: Something came since the last selection.
        is_saved: Nothing came since it was written to disk.
    """

    sketch: PrefixSketch = field(default_factory=lambda: PrefixSketch(HALF_LIFE_S))
    uses: dict[bytes, PinUse] = field(default_factory=dict)
    covered: dict[bytes, str] = field(default_factory=dict)
    refused_until_s: dict[bytes, float] = field(default_factory=dict)
    places: dict[tuple[bytes, int], ChangingPlace] = field(default_factory=dict)
    selection: Selection | None = None
    wanted: frozenset[bytes] = frozenset()
    is_changed: bool = False
    is_saved: bool = True

    def observe(self, request: SeenRequest, prefill_tokens_per_s: float, now_unix_s: float) -> None:
        """Count a request. Some microseconds."""
        self.sketch.observe(request, now_unix_s)
        for digest, num_tokens, _ in reversed(request.prefixes):
            if (use := self.uses.get(digest)) is not None:
                use.add(num_tokens, prefill_tokens_per_s, now_unix_s)
                break
        self.is_changed, self.is_saved = True, False

    def put_place(self, place: ChangingPlace) -> bool:
        """Keep the place, and return whether it is new; of too many, the one that was reported longest ago goes."""
        key = place.digest, place.num_stable_tokens
        is_new = self.places.pop(key, None) is None
        self.places[key] = place
        if len(self.places) > MAX_PLACES:
            del self.places[next(iter(self.places))]
        self.is_saved = False
        return is_new

    def wanted_choice(self, digest: bytes) -> PrefixChoice | None:
        """Return the choice whose tokens engines were asked for."""
        if digest not in self.wanted or self.selection is None:
            return None
        return next((choice for choice in self.selection.chosen if choice.digest == digest), None)

    def forget_refusals(self, now_s: float) -> None:
        """Drop refusals whose time is over."""
        self.refused_until_s = {digest: until for digest, until in self.refused_until_s.items() if until > now_s}
