"""Reports what requests begin with: the scheduler's side, and the thread that does the work."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kvtier._pb import engine_pb2 as pb
from kvtier.client.engine_session import Attachment
from kvtier.core.limits import TEXT
from kvtier.printable import shortened
from kvtier_connector.discovery.chat_rendering import ChatRenderer, NoUserTurnError, interrupted_after
from kvtier_connector.discovery.observed_requests import ChunkShape, ObservedRequest, RequestQueue
from kvtier_connector.discovery.request_reader import RequestReader, TemplateKnowledge, wanted_tokens
from kvtier_connector.discovery.system_prompts import SystemPrompts
from kvtier_connector.discovery.user_turn import LEARNING_TIMEOUT_S, UserTurn, learn_user_turn
from kvtier_connector.engine.chunk_keys import GroupShape
from kvtier_connector.engine.lora.adapter_digests import Adapter

REPORT_PERIOD_S = 0.25
MAX_REPORTED = 1024
"""Requests of one message."""
_WORK_S, _PAUSE_S = 0.001, 0.004
"""The thread holds the interpreter's lock a fifth of the time at most: the scheduler needs it too."""
_MAX_WANTED = 64

logger = logging.getLogger(__name__)


class ObserverCounts(NamedTuple):
    """Since the last call; for the metrics."""

    num_observed: int
    num_skipped: int
    knows_template: bool


class _Session:
    """What belongs to one session with the daemon: its queue, and which prefixes it wants."""

    def __init__(self, attachment: Attachment) -> None:
        self.attachment, self.queue = attachment, RequestQueue()
        self.wanted: set[bytes] = set()  # replaced by the scheduler's thread, emptied by the observer's
        self.num_unread = 0  # requests taken from the queue, but not reported
        self.num_counted_skips = self.num_reported_skips = 0  # in the metrics, and to the daemon

    def num_skipped(self) -> int:
        """Return how many requests were not reported so far."""
        return self.queue.num_skipped + self.num_unread


class PromptObserver:
    """Sees each request once, for as long as the daemon asks for reports.

    The scheduler's thread calls everything that is public; it never waits. The thread `kvtier-discovery` begins with
    the first session, because requests that ask for a pin need the template too, and ends with `close`.

    Args:
        groups: The engine's KV cache groups.
        adapter_digest: Of an adapter's content; None while it is unknown. Any thread.
        load_chat: Loads the model's tokenizer and chat template. Observer's thread.
    """

    def __init__(
        self,
        groups: Sequence[GroupShape],
        adapter_digest: Callable[[Adapter], bytes | None],
        load_chat: Callable[[], ChatRenderer],
    ) -> None:
        self._shape = ChunkShape.of(groups)
        self._adapter_digest, self._load_chat = adapter_digest, load_chat
        self._session: _Session | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        # Counted by the observer's thread, read by the scheduler's.
        self._num_observed = self._num_skipped = 0
        self._template: TemplateKnowledge | None = None
        self._is_learning = True
        self._prompts: SystemPrompts | None = None  # of the scheduler's thread
        self._taken: ObserverCounts | None = None  # all that was taken
        self._has_failed = False

    def attach(self, attachment: Attachment | None) -> None:
        """Report in this session from now on, if it wants reports; None: there is none."""
        wants_reports = attachment is not None and attachment.welcome.report_requests
        self._session = _Session(attachment) if attachment is not None and wants_reports else None
        if attachment is not None and self._thread is None:
            thread = threading.Thread(target=self._run, name="kvtier-discovery", daemon=True)
            try:
                thread.start()
            except RuntimeError as exc:  # the system allows no more; the next session tries again
                logger.warning("kvtier: no prompts are found in this session: %s", exc)
                self._session, self._is_learning = None, False
            else:
                self._thread = thread

    def set_wanted(self, digests: Iterable[bytes]) -> None:
        """Send the tokens of these prefixes when a request begins with them; this list replaces the last one."""
        if self._session is not None:
            self._session.wanted = set(list(digests)[:_MAX_WANTED])

    def observe(self, request: Any, adapter: Adapter | None) -> None:
        """Queue a reference to a user's request; while the queue is full, count the request as skipped."""
        session = self._session
        if session is None or request.prompt_embeds is not None or request.prompt_token_ids is None:
            return
        if len(request.prompt_token_ids) < self._shape.chunk_tokens:
            return
        if not TEXT.takes(request.cache_salt or ""):  # no pin can have it
            session.queue.num_skipped += 1
            return
        try:
            session.queue.put(request, adapter)
        except Exception:  # whatever another version of vLLM has there: its request goes on
            session.queue.num_skipped += 1

    def shared_tokens(self, request: Any) -> int | None:
        """Return how much of a prompt of vLLM's other requests may share: its system prompt.

        All of it where the chat template does not tell; None as long as the template is being learnt.
        """
        if self._is_learning:
            return None
        num_tokens: int = request.num_prompt_tokens
        if self._template is None or request.prompt_token_ids is None or request.prompt_embeds is not None:
            return num_tokens
        if self._prompts is None:
            self._prompts = SystemPrompts(self._shape, self._template.opening, self._template.anchor)
        end = self._prompts.end(ObservedRequest.of(request, None))
        return num_tokens if end is None else end

    def take_counts(self) -> ObserverCounts | None:
        """Return what was counted since the last call; None when that is nothing. Each step asks."""
        now = ObserverCounts(self._num_observed, self._num_skipped, self._template is not None)
        if now == self._taken:
            return None
        taken, self._taken = self._taken or ObserverCounts(0, 0, False), now
        return ObserverCounts(
            now.num_observed - taken.num_observed, now.num_skipped - taken.num_skipped, now.knows_template
        )

    def close(self) -> None:
        """End the thread after what it does at the moment; does not wait."""
        self._session = None
        self._closing.set()

    # The observer's thread.

    def _run(self) -> None:
        template = self._learn()
        self._is_learning = False
        reader = RequestReader(self._shape, self._adapter_digest, template)
        while not self._closing.wait(REPORT_PERIOD_S):
            if (session := self._session) is not None:
                try:
                    self._report(session, reader)
                except Exception:  # never into vLLM; what is wrong with one request may be right with the next
                    self._log_failure()

    def _learn(self) -> TemplateKnowledge | None:
        try:
            return self._learn_template()
        except NoUserTurnError as exc:
            reason = str(exc)
        except TimeoutError:
            reason = f"the chat template is not rendered within {LEARNING_TIMEOUT_S:.0f} s"
        except Exception as exc:  # tokenizers and templates are programs of others
            reason = shortened(f"the tokenizer or the chat template fails ({type(exc).__name__}: {exc})")
        logger.info("kvtier: prompts are found by fixed lengths only: %s", reason)
        return None

    def _learn_template(self) -> TemplateKnowledge:
        chat = self._load_chat()
        with interrupted_after(LEARNING_TIMEOUT_S):
            turn = learn_user_turn(chat)
        logger.info("kvtier: system prompts are found up to the first user turn, %r", chat.decode(turn.opening))
        for remark in turn.remarks:
            logger.info("kvtier: the chat template: %s", remark)
        self._template = TemplateKnowledge(turn.opening, _anchor(chat, turn), chat.decode)
        return self._template

    def _report(self, session: _Session, reader: RequestReader) -> None:
        report = pb.RequestsSeen()
        deadline_s = time.monotonic() + REPORT_PERIOD_S
        worked_since_s = time.thread_time()
        while time.monotonic() < deadline_s and (request := session.queue.take()) is not None:
            self._read(session, reader, request, report)
            if time.thread_time() - worked_since_s > _WORK_S:
                if self._closing.wait(_PAUSE_S):
                    return
                worked_since_s = time.thread_time()
            if len(report.requests) == MAX_REPORTED:
                break
        self._send(session, report)

    def _read(
        self, session: _Session, reader: RequestReader, request: ObservedRequest, report: pb.RequestsSeen
    ) -> None:
        try:
            reading = reader.read(request)
        except Exception:  # whatever it is, others are read
            self._log_failure()
            reading = None
        if reading is None or session.attachment.is_behind:
            session.num_unread += 1
            return
        report.requests.append(reading.seen)
        if reading.changing is not None:
            session.attachment.send(pb.EngineMessage(changing_middle=reading.changing))
        for prefix in wanted_tokens(self._shape, request, reading.seen, session.wanted):
            session.attachment.send(pb.EngineMessage(prefix_tokens=prefix))

    def _send(self, session: _Session, report: pb.RequestsSeen) -> None:
        is_behind = session.attachment.is_behind
        if is_behind:
            session.num_unread += len(report.requests)
            del report.requests[:]
        num_skipped = session.num_skipped()
        self._num_observed += len(report.requests)
        self._num_skipped += num_skipped - session.num_counted_skips
        session.num_counted_skips = num_skipped
        if is_behind:
            return
        report.num_skipped = num_skipped - session.num_reported_skips
        session.num_reported_skips = num_skipped
        if report.requests or report.num_skipped:
            session.attachment.send_later(pb.EngineMessage(requests_seen=report))

    def _log_failure(self) -> None:
        if not self._has_failed:
            logger.exception("kvtier: a request could not be looked at; it is counted as skipped, as others will be")
        self._has_failed = True


def _anchor(chat: ChatRenderer, turn: UserTurn) -> int:
    """Return the index of a token that no text contains; of the first one where there is none."""
    special = (index for index, token in enumerate(turn.opening) if token in chat.special_tokens)
    return next(special, 0)
