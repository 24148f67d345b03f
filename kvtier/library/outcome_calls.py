"""The methods of `Client` that say why requests hit or missed."""

import builtins
from collections.abc import Iterable, Mapping
from typing import Any

from kvtier._pb import cache_pb2 as pb
from kvtier.core.limits import MAX_LISTED_REQUESTS
from kvtier.errors import InvalidArgumentError
from kvtier.library.flows.explaining import difference_of, tokens_of_request
from kvtier.library.proof_calls import ProofCalls
from kvtier.library.rendering.recipe import listed_tokens
from kvtier.library.values.conversion import from_message
from kvtier.library.values.outcome_values import Explained, Explanation, NearPrompt, RecentRequest, RequestOutcome
from kvtier.library.values.public_values import DaemonStatus
from kvtier.library.values.remote_values import RemoteStatus
from kvtier.library.values.savings import Savings, savings_of


class OutcomeCalls(ProofCalls):
    """Explain requests, list those that ended lately, and look at the store that hosts share."""

    def explain(
        self,
        request: Mapping[str, Any] | None = None,
        *,
        tokens: Iterable[int] | None = None,
        model: str = "",
        lora_name: str = "",
        cache_salt: str = "",
    ) -> Explained:
        """Return what a request would be restored now, and why not more. Stores nothing, and computes nothing.

        Args:
            request: As it is sent to vLLM: an object with `messages` or `prompt`, `model`, `tools`, `cache_salt` ...;
                vLLM turns it into tokens. Or give `tokens`.
            tokens: Of the whole prompt.
            model: With `tokens`: the base model; empty: any.
            lora_name: With `tokens`: the adapter.
            cache_salt: With `tokens`.

        Raises:
            InvalidArgumentError: Neither or both are given, or it is no request.
            RenderError: vLLM cannot turn it into tokens.
        """
        if (request is None) == (tokens is None):
            raise InvalidArgumentError("request", "..." if request is not None else None, "give a request, or tokens")
        served = model
        if request is not None:
            served, requested = tokens_of_request(request, self._vllm)
            cache_salt = str(request.get("cache_salt") or "")
            known = {each.name: each for each in self._vllm.models()} if served else {}
            if served in known:
                model, lora_name = known[served].base, known[served].lora_name
        else:
            requested = listed_tokens(tokens)
        asked = pb.ExplainRequest(tokens=requested, model=model, lora_name=lora_name, cache_salt=cache_salt)
        explanation = from_message(Explanation, self._read(lambda: self._daemon.explain(asked)))
        difference, near = None, _differing(explanation)
        if near is not None and request is not None:
            pinned = self.tokens(near.name)
            difference = difference_of(near.name, requested, pinned, near.differs_at, served, self._vllm)
        return Explained(explanation=explanation, num_tokens=len(requested), difference=difference)

    def explain_request(self, request_id: str) -> Explained:
        """Return why a recent request was restored what it was.

        Raises:
            RequestNotFoundError: It is not among the last ones that engines have reported.
        """
        asked = pb.ExplainRequest(request_id=request_id)
        return Explained(explanation=from_message(Explanation, self._read(lambda: self._daemon.explain(asked))))

    def recent_requests(
        self, *, limit: int = 100, outcomes: Iterable[RequestOutcome] = (), misses_only: bool = False
    ) -> builtins.list[RecentRequest]:
        """Return requests that ended lately, the last one first; the daemon keeps 4096.

        Args:
            limit: At most this many.
            outcomes: Only those with one of these; none: all.
            misses_only: Only those that kvtier has, or should have, something of.

        Raises:
            InvalidArgumentError: The limit is out of range, or one of these is UNRECOGNIZED: no daemon knows it by that
                name.
        """
        MAX_LISTED_REQUESTS.check(self._NAMES["limit"], limit)
        wanted = [outcome.name for outcome in outcomes]
        if RequestOutcome.UNRECOGNIZED.name in wanted:
            raise InvalidArgumentError("outcomes", RequestOutcome.UNRECOGNIZED.value, "is not the name of an outcome")
        asked = pb.ListRecentRequestsRequest(max_requests=limit, outcomes=wanted, misses_only=misses_only)
        return [from_message(RecentRequest, each) for each in self._read(lambda: self._daemon.recent_requests(asked))]

    def savings(self) -> Savings:
        """Return what requests got since the daemon's start, and what prompts saved since they were pinned."""
        return savings_of(from_message(DaemonStatus, self._read(self._daemon.status)), self.list())

    def remote(self, *, with_hosts: bool = False) -> RemoteStatus:
        """Return how the daemon stands with the store that hosts share.

        Args:
            with_hosts: Ask the store which hosts share it.

        Raises:
            KvtierError: The hosts were asked for, and the store does not answer.
        """
        return from_message(RemoteStatus, self._read(lambda: self._daemon.remote(with_hosts=with_hosts)))


def _differing(explanation: Explanation) -> NearPrompt | None:
    """Return the prompt whose difference explains a miss: one that may be restored, before others."""
    if explanation.outcome not in (RequestOutcome.DIVERGED, RequestOutcome.UNKNOWN):
        return None  # it begins with a whole pin, and others that it leaves do not matter
    found = (each for each in explanation.prompts if each.differs_at)
    return min(found, key=lambda each: bool(each.differs_in), default=None)
