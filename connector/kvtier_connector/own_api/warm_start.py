"""Warm start: vLLM starts with an empty prefix cache; pinned prompts are loaded into it before users ask for them.

A thread of its own asks vLLM's own API server for one token after each pinned prompt that the daemon holds, while no
request of a user is open in this engine (ADR 17). It begins once, when the first session has bound its pins, and again
whenever vLLM has emptied its cache. Between these rounds it has what is not durable rendered and computed
(`refresh.py`). Every failure is only logged; vLLM never waits for the warm start.

Threads: `bound` is called by the thread that binds pins, `reset` and `take_failures` by the scheduler, `close` by any;
the rest runs in the thread of the warm start.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvtier._pb.cache_pb2 import PromptStatus
from kvtier.client.admin import AdminClient
from kvtier.client.engine_session import Attachment
from kvtier.client.warm_requests import (
    by_importance,
    cache_tokens_taken,
    new_request_id,
    same_request,
    warm_body,
    warm_tokens,
)
from kvtier.concurrency.pauses import POLL_S, RETRY_S, SLOW_POLL_S
from kvtier.errors import KvtierError, PromptNotFoundError, PromptUnrenderedError
from kvtier.printable import shown_url
from kvtier_connector.engine.facts import EngineFacts
from kvtier_connector.own_api.engine_api_client import ApiGoneError, ApiRefusedError, EngineApiClient
from kvtier_connector.settings import AUTO

if TYPE_CHECKING:
    from kvtier_connector.own_api.refresh import Refresher

logger = logging.getLogger(__name__)

TIMEOUT_S = 600.0
"""For vLLM to answer, for the session to come up, and for warming: a large model takes minutes to load."""
MAX_RATIO = 0.5
"""Share of vLLM's cache that warm prompts may take: as much as pins may keep there, see `gpu_pins.hooks`."""
_UNAUTHORIZED = (401, 403)


class WarmStart:
    """The thread and its state.

    Args:
        facts: Of this engine, with a `warm_url`.
        api_key: For vLLM's API server; empty: it asks for none.
        find_api_server: Returns its URL, for `warm_url = "auto"`; None: not found yet.
    """

    def __init__(self, facts: EngineFacts, api_key: str, find_api_server: Callable[[], str | None]) -> None:
        self._facts, self._api_key, self._find_api_server = facts, api_key, find_api_server
        self._open_api: EngineApiClient | None = None  # None: the server is not found yet
        self._url = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-warm", daemon=True)
        self._attachment: Attachment | None = None
        self._turn = 0  # sessions of an earlier turn are void
        self._serves_users: Callable[[], bool] = lambda: False
        self._prefix_cache: Callable[[], object] = lambda: None  # vLLM's index of it, another one after each reset
        self._is_refused = False
        self._refresher: Refresher | None = None
        self._num_failures = 0  # since the start
        self._num_taken = 0  # of them

    def watch(self, serves_users: Callable[[], bool], prefix_cache: Callable[[], object]) -> None:
        """Set what to watch; called before the first session."""
        self._serves_users, self._prefix_cache = serves_users, prefix_cache

    def bound(self, attachment: Attachment) -> None:
        """The pins that stood when this session began are known to the scheduler."""
        if attachment.turn < self._turn:
            return
        self._attachment = attachment
        if self._thread.ident is None and not self._stop.is_set():
            self._thread.start()

    def reset(self) -> None:
        """vLLM and kvtier continue in another namespace: prompts of the old one are no longer warmed."""
        self._turn += 1
        self._attachment = None

    def take_failures(self) -> int:
        """Return how many prompts could not be warmed since the last call."""
        num_new = self._num_failures - self._num_taken
        self._num_taken += num_new
        return num_new

    def close(self, timeout_s: float = 1.0) -> None:
        """End the thread, and the request that it waits for."""
        self._stop.set()
        if self._open_api is not None:
            self._open_api.close()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            if not self._reach_api():
                return
            while not self._stop.is_set():
                cache = self._round()
                while self._prefix_cache() is cache and not self._stop.wait(SLOW_POLL_S):
                    if self._is_refused:
                        return
                    self._refresh()
        except Exception:  # vLLM serves without the warm start
            logger.exception("kvtier: the warm start failed")

    def _reach_api(self) -> bool:
        """Find out where vLLM's API server is; False if it cannot be found."""
        if (url := self._api_url()) is None:
            return False
        self._open_api, self._url = EngineApiClient(url, self._api_key), shown_url(url)
        if self._facts.settings.refresh:
            # Here, because its HTTP client takes a tenth of a second to load.
            from kvtier_connector.own_api.refresh import Refresher

            self._refresher = Refresher(self._facts, url, self._is_quiet, self._compute)
        return True

    def _api_url(self) -> str | None:
        if (url := self._facts.settings.warm_url) != AUTO:
            return url
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            if (url := self._find_api_server()) is not None:
                logger.info("kvtier warm start: the API server of this vLLM is %s", url)
                return url
            if self._stop.wait(SLOW_POLL_S):
                return None
        logger.warning("kvtier: the warm start found no API server of this vLLM; set warm_url to its URL")
        return None

    @property
    def _api(self) -> EngineApiClient:
        assert self._open_api is not None
        return self._open_api

    def _refresh(self) -> None:
        """Render and compute what is not durable, if it is time to look for that."""
        attachment, refresher = self._attachment, self._refresher
        if attachment is None or refresher is None or not refresher.is_due():
            return
        settings = self._facts.settings
        try:
            with AdminClient(settings.socket, daemon_uid=settings.daemon_uid) as daemon:
                refresher.look(daemon, attachment.welcome.namespace_id)
        except KvtierError as exc:  # the next look tries again
            logger.debug("kvtier: refreshing failed: %s", exc)
        except Exception:  # such as a thread that the system refuses
            logger.exception("kvtier: refreshing failed; it is tried again after %g s", RETRY_S)
            self._stop.wait(RETRY_S)

    def _is_quiet(self) -> bool:
        return self._until(lambda: not self._serves_users(), SLOW_POLL_S)

    def _compute(self, daemon: AdminClient, status: PromptStatus) -> str:
        return self._warm(daemon, status, TIMEOUT_S, [])

    def _round(self) -> object:
        """Warm what is pinned; return vLLM's cache as it was when that began."""
        if not self._until(self._api.is_healthy, TIMEOUT_S):
            self._warn_unless_stopped("no answer from %s/health within %g s; is warm_url right?", TIMEOUT_S)
            return self._prefix_cache()
        cache = self._prefix_cache()
        self._until(lambda: self._attachment is not None, TIMEOUT_S)
        if (attachment := self._attachment) is None:
            return cache
        try:
            settings = self._facts.settings
            with AdminClient(settings.socket, daemon_uid=settings.daemon_uid) as daemon:
                self._warm_all(daemon, self._held(daemon.list(), attachment), attachment)
        except KvtierError as exc:
            self._warn_unless_stopped("of %s ends: %s", exc)
        except Exception:
            logger.exception("kvtier: the warm start failed; prompts are warmed again when vLLM has emptied its cache")
        return cache

    def _held(self, prompts: Sequence[PromptStatus], attachment: Attachment) -> list[PromptStatus]:
        """Return the prompts that this engine can load as a whole, by importance, as far as they fit.

        Of several names for one prompt, the first stands for all.
        """
        namespace_id = attachment.welcome.namespace_id
        block_tokens = self._facts.vllm_config.cache_config.block_size
        seen = set()
        left = int(self._facts.cache_tokens() * MAX_RATIO)
        chosen = []
        for status in by_importance(status for status in prompts if self._is_ours(status, namespace_id)):
            if (request := same_request(status)) in seen:
                continue
            seen.add(request)
            needed = cache_tokens_taken(status.num_tokens, block_tokens)
            if needed > left:
                logger.info(
                    "kvtier warm start leaves out name=%s tokens=%d: half of vLLM's cache leaves %d",
                    status.name,
                    status.num_tokens,
                    left,
                )
                continue
            left -= needed
            chosen.append(status)
        return chosen

    def _is_ours(self, status: PromptStatus, namespace_id: str) -> bool:
        """Return whether this engine serves the prompt, and all of it is in one tier: else there is computing to do."""
        is_served = not status.model or status.model in self._facts.model_names
        is_held = any(
            binding.namespace_id == namespace_id
            and 0 < binding.num_chunks <= max(binding.num_host_chunks, binding.num_durable_chunks)
            for binding in status.bindings
        )
        return status.pinned and is_served and is_held

    def _warm_all(self, daemon: AdminClient, prompts: Sequence[PromptStatus], attachment: Attachment) -> None:
        if not prompts:
            logger.info("kvtier warm start: nothing to load; the daemon holds no KV of pins for this engine yet")
            return
        num_tokens = sum(status.num_tokens for status in prompts)
        logger.info("kvtier warm start began prompts=%d tokens=%d", len(prompts), num_tokens)
        began_s, num_failures, warmed, problem = time.monotonic(), self._num_failures, list[PromptStatus](), ""
        deadline_s = began_s + TIMEOUT_S
        for status in prompts:
            is_quiet = self._until(lambda: not self._serves_users(), deadline_s - time.monotonic())
            if self._stop.is_set():
                return
            if attachment.turn < self._turn:  # asleep, perhaps
                problem = "kvtier was reset"
            elif not is_quiet:
                problem = "vLLM is busy"
            else:
                problem = self._warm(daemon, status, max(1.0, deadline_s - time.monotonic()), warmed)
            if problem:
                break
        logger.log(
            logging.WARNING if problem else logging.INFO,
            "kvtier warm start ended prompts=%d of %d tokens=%d failed=%d seconds=%.2f%s",
            len(warmed),
            len(prompts),
            sum(status.num_tokens for status in warmed),
            self._num_failures - num_failures,
            time.monotonic() - began_s,
            f": {problem}" if problem else "",
        )

    def _warm(self, daemon: AdminClient, status: PromptStatus, timeout_s: float, warmed: list[PromptStatus]) -> str:
        """Warm one prompt, unless it is gone; return why the round ends with it, if it does."""
        try:
            tokens = daemon.tokens(status.name)
        except (PromptNotFoundError, PromptUnrenderedError) as exc:  # it ended, or has no tokens, since it was listed
            logger.info("kvtier: %s is not warmed: %s", status.name, exc)
            return ""
        try:
            self._api.complete(self._body(status, tokens), timeout_s)
        except ApiGoneError as exc:
            self._num_failures += 1
            return f"{self._url}: {exc}"
        except ApiRefusedError as exc:
            self._num_failures += 1
            self._is_refused = exc.status in _UNAUTHORIZED
            if not self._is_refused:
                logger.warning("kvtier: %s refuses to warm %s (%s)", self._url, status.name, exc)
                return ""
            logger.warning(
                "kvtier: %s refuses the warm start (%s): set VLLM_API_KEY in vLLM's environment, or leave warm_url out",
                self._url,
                exc,
            )
            return "no API key"
        warmed.append(status)
        return ""

    def _body(self, status: PromptStatus, tokens: Sequence[int]) -> dict[str, Any]:
        model = status.lora_name or self._facts.model_names[0]
        body = warm_body(model, warm_tokens(status, tokens), status.cache_salt, new_request_id())
        if self._facts.vllm_config.scheduler_config.policy == "priority":  # without it vLLM refuses the field
            body["priority"] = 2**31 - 1  # vLLM handles the lowest number first
        return body

    def _until(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until it holds; False after the timeout, or when the warm start ends."""
        deadline_s = time.monotonic() + timeout_s
        while not self._stop.is_set():
            if holds():
                return True
            if time.monotonic() >= deadline_s:
                return False
            self._stop.wait(POLL_S)
        return False

    def _warn_unless_stopped(self, problem: str, *values: object) -> None:
        if not self._stop.is_set():
            logger.warning(f"kvtier: the warm start {problem}", self._url, *values)
