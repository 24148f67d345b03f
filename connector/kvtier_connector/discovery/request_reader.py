"""Turns observed requests into what the daemon is notified of."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvtier._pb import engine_pb2 as pb
from kvtier_connector.discovery.changing_middle import ChangingMiddles, ChangingPlace
from kvtier_connector.discovery.observed_requests import ChunkShape, ObservedRequest
from kvtier_connector.discovery.seen_prefixes import prefix_digest, seen_request
from kvtier_connector.discovery.system_prompts import SystemPrompts
from kvtier_connector.engine.lora.adapter_digests import Adapter

_BEFORE_BYTES, _EXAMPLE_BYTES = 1024, 256


class TemplateKnowledge(NamedTuple):
    """What was learnt from the chat template."""

    opening: tuple[int, ...]  # of the first user turn
    anchor: int  # index of the token among them by which it is searched
    decode: Callable[[Sequence[int]], str]


class RequestReading(NamedTuple):
    """What there is to report of a request."""

    seen: pb.SeenRequest
    changing: pb.ChangingMiddle | None  # that many prompts differ where this one does, if that is news


class RequestReader:
    """Reads requests, and remembers what earlier ones began with. Observer's thread only.

    Args:
        shape: How prompts divide into chunks.
        adapter_digest: Of an adapter's content; None while it is unknown.
        template: What is known of the chat template; None: prefixes of fixed lengths are all there is.
    """

    def __init__(
        self, shape: ChunkShape, adapter_digest: Callable[[Adapter], bytes | None], template: TemplateKnowledge | None
    ) -> None:
        self._shape, self._adapter_digest, self._template = shape, adapter_digest, template
        self._prompts = SystemPrompts(shape, template.opening, template.anchor) if template is not None else None
        self._middles = ChangingMiddles(shape)

    def read(self, request: ObservedRequest) -> RequestReading | None:
        """Return what to report; None while the content of the request's adapter is unknown."""
        digest = self._adapter_digest(request.adapter) if request.adapter is not None else None
        if request.adapter is not None and digest is None:
            return None
        system_tokens = self._prompts.end(request) if self._prompts is not None else None
        place = stable_tokens = None
        if system_tokens is not None:
            place = self._middles.take(request, system_tokens)
            stable_tokens = self._middles.stable_tokens(request)
        seen = seen_request(self._shape, request, digest, system_tokens, stable_tokens)
        return RequestReading(seen, self._changing_middle(request, place, digest) if place is not None else None)

    def _changing_middle(
        self, request: ObservedRequest, place: ChangingPlace, adapter_digest: bytes | None
    ) -> pb.ChangingMiddle:
        stable = self._shape.whole(place.num_stable_tokens)
        return pb.ChangingMiddle(
            digest=prefix_digest(self._shape, request, stable, adapter_digest) if stable else b"",
            num_stable_tokens=place.num_stable_tokens,
            num_tokens=place.num_tokens,
            num_prompts=place.num_prompts(),
            before=self._text(place.before)[-_BEFORE_BYTES:].decode(errors="ignore"),
            examples=[self._text(each)[:_EXAMPLE_BYTES].decode(errors="ignore") for each in place.examples],
        )

    def _text(self, tokens: Sequence[int]) -> bytes:
        assert self._template is not None, "only system prompts have such places"
        return self._template.decode(tokens).replace("\0", "").encode(errors="replace")


def wanted_tokens(
    shape: ChunkShape, request: ObservedRequest, seen: pb.SeenRequest, wanted: set[bytes]
) -> Iterator[pb.PrefixTokens]:
    """Yield the tokens of the request's prefixes that are wanted; these are wanted no longer."""
    for prefix in seen.prefixes:
        num_tokens = prefix.num_tokens + shape.is_windowed
        if prefix.digest in wanted and num_tokens <= request.num_tokens:
            wanted.remove(prefix.digest)
            yield pb.PrefixTokens(
                digest=prefix.digest,
                tokens=request.tokens[:num_tokens],
                lora_name=request.adapter.name if request.adapter is not None else "",
                lora_path=request.adapter.path if request.adapter is not None else "",
                cache_salt=request.cache_salt,
            )
