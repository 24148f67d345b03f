"""The methods of `Client` that say whether prompts are right and ready, what happens, and that stop a namespace."""

import time
from collections.abc import Sequence
from typing import Literal

from kvtier._pb import cache_pb2 as pb
from kvtier.concurrency.pauses import POLL_S, SLOW_POLL_S
from kvtier.errors import DaemonUnreachableError, InvalidArgumentError
from kvtier.library.declared_calls import DeclaredCalls
from kvtier.library.flows.verify_flow import compare_with
from kvtier.library.values.conversion import from_message, one_of, prompt_of
from kvtier.library.values.proof_values import Event, Readiness, VerifyReport, VerifyResult
from kvtier.library.values.public_values import DaemonStatus, Namespace
from kvtier.library.watches import Watch

ReadyTier = Literal["device", "host", "disk"]
_WHERE = {"device": pb.ReadyRequest.DEVICE, "host": pb.ReadyRequest.HOST, "disk": pb.ReadyRequest.DISK}


class ProofCalls(DeclaredCalls):
    """Verify, wait for readiness, follow events, quarantine."""

    def verify(self, name: str, *, live: bool = True, timeout_s: float = 600.0) -> VerifyResult:
        """Verify a prompt: its bytes beside their checksums, and with `live` its answers beside vLLM's own.

        Checksums prove that bytes are those that were stored; damaged chunks are dropped, and stored again when next
        computed. The live comparison proves that they are the KV of these tokens (ADR 30): 3 requests, or two dozen on
        a busy vLLM. Where no vLLM answers, it is inconclusive.

        Args:
            name: Of the prompt.
            live: Ask vLLM too. Beside other requests the comparison may be inconclusive.
            timeout_s: For one answer of vLLM.

        Returns:
            What was found; look at `damaged`, `different` and `conclusive`. Nothing is quarantined.

        Raises:
            PromptNotBoundError: No engine has recognized it yet, so nothing is stored.
        """
        began_unix_s = time.time()
        vllm = self._vllm if live else None  # before the long part: a mistake in its URL is an error
        message = self._daemon.verify(pb.VerifyPromptRequest(name=name))
        prompt, status = prompt_of(self._daemon.get(name)), from_message(DaemonStatus, self._daemon.status())
        tokens = self._daemon.tokens(name) if vllm else ()
        outcome = compare_with(vllm, prompt, tokens, status, timeout_s) if vllm else None
        return VerifyResult(
            name=name,
            pin_id=prompt.pin_id,
            tokens_digest=prompt.tokens_digest,
            num_tokens=prompt.num_tokens,
            verified_unix_s=began_unix_s,
            daemon_version=status.version,
            vllm_version=outcome.vllm_version if outcome else "",
            model=outcome.model if outcome else "",
            url=vllm.url if vllm else "",
            checksums=from_message(VerifyReport, message),
            live=outcome.comparison if outcome else None,
            live_namespace_ids=outcome.namespace_ids if outcome else (),
        )

    def check_ready(self, *names: str, selector: str = "", tier: ReadyTier = "disk") -> Readiness:
        """Return whether pinned prompts can be restored now.

        Args:
            names: Of prompts; none: every prompt that operators pinned, as it was seen at most half a minute ago.
            selector: Those whose labels it selects, instead of names. Where it selects none, nothing is ready.
            tier: `disk`: durable for every attached engine. `host`: besides, in host memory. `device`: besides `disk`,
                in vLLM's prefix cache of every engine, at this moment.

        Raises:
            InvalidArgumentError: There is no such tier, or names and labels are given.
        """
        where = one_of(self._NAMES["tier"], tier, _WHERE)
        if names and selector:
            raise InvalidArgumentError(self._NAMES["selector"], selector, "cannot go with names")
        wanted: Sequence[str] = names
        if selector:
            wanted = [each.name for each in self.list(selector=selector) if each.pinned and each.origin == "named"]
            if not wanted:
                return Readiness(ready=False, num_prompts=0, num_ready=0, waiting=())
        request = pb.ReadyRequest(names=wanted, where=where)
        return from_message(Readiness, self._read(lambda: self._daemon.check_ready(request)))

    def wait_ready(
        self, *names: str, selector: str = "", tier: ReadyTier = "disk", timeout_s: float = 600.0
    ) -> Readiness:
        """Wait until prompts are ready, or the time is up; returns what was so then. See `check_ready`.

        It returns earlier when waiting does not help: vLLM cannot use any of the prompts that are not ready. A daemon
        that does not answer yet is waited for too; DaemonUnreachableError when the time is up.
        """
        end_s = time.monotonic() + timeout_s
        while True:
            left_s = end_s - time.monotonic()
            try:
                readiness = self.check_ready(*names, selector=selector, tier=tier)
                if readiness.ready or left_s <= 0 or readiness.only_refused:
                    return readiness
            except DaemonUnreachableError:
                if left_s <= 0:
                    raise
            pause_s = SLOW_POLL_S if tier == "device" else POLL_S  # engines are asked, which have other work
            time.sleep(min(pause_s, max(0.0, left_s)))

    def watch_events(self, *names: str, timeout_s: float | None = None) -> Watch[Event]:
        """Return an iterator of what the daemon does from now on: the events of docs/logs.md, from `info` up.

        No field holds a prompt's text or tokens. It ends after `timeout_s` (None: never) or by `close`.

        Args:
            names: Only these events.
            timeout_s: See above.
        """
        stream = self._daemon.watch_events(names, timeout_s=timeout_s)
        return Watch(stream, lambda message: from_message(Event, message))

    def quarantine(self, namespace_id: str, reason: str) -> Namespace:
        """Stop a namespace whose KV is not trusted: it serves and stores nothing; vLLM computes everything.

        Nothing is deleted. It ends by `release`, or when its last chunk is evicted.

        Args:
            namespace_id: Or the beginning of it, if no other begins so.
            reason: For people.

        Raises:
            NamespaceNotFoundError: There is none.
        """
        return from_message(Namespace, self._daemon.quarantine(self._whole_id(namespace_id), reason))

    def release(self, namespace_id: str) -> Namespace:
        """Let a namespace serve and store again. Arguments and errors as of `quarantine`."""
        return from_message(Namespace, self._daemon.release(self._whole_id(namespace_id)))
