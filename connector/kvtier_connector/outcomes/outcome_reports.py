"""Reports to the daemon how requests of users ended; without a session, in the next one."""

import time
from collections import deque
from typing import Any

from kvtier._pb import engine_pb2 as pb
from kvtier.client.engine_session import Attachment
from kvtier.client.warm_requests import is_warm_request
from kvtier.core.limits import MAX_ENDED_REQUESTS, REQUEST_ID
from kvtier.core.requests.verify_salts import verification_of
from kvtier_connector.engine.vllm_compat import client_request_id
from kvtier_connector.outcomes.request_account import RequestAccount


class OutcomeReports:
    """Reports to the current session. Scheduler thread only; never waits."""

    def __init__(self) -> None:
        self._attachment: Attachment | None = None
        self._kept: deque[pb.RequestEnded] = deque(maxlen=MAX_ENDED_REQUESTS)  # those that ended without a session
        self._num_dropped = 0  # not reported, and not counted in a message yet

    def attach(self, attachment: Attachment | None) -> None:
        """Another session is up, or none."""
        self._attachment = attachment
        if attachment is not None and (self._kept or self._num_dropped):
            self._send(attachment, *self._kept)
            self._kept.clear()

    def ended(self, request: Any, account: RequestAccount) -> None:
        """Report a request that vLLM has begun to compute, unless it warms or verifies a prompt."""
        if account.outcome is None or is_warm_request(request.request_id):
            return
        if verification_of(request.cache_salt) is not None:
            return
        share = account.share
        report = pb.RequestEnded(
            request_id=_bounded(client_request_id(request.request_id)),
            outcome=account.outcome.name,
            pin_id="" if share is None else share.pin_id,
            prompt_tokens=request.num_prompt_tokens,
            shared_tokens=0 if share is None else share.num_tokens,
            device_tokens=account.device_tokens,
            host_tokens=account.host_tokens,
            disk_tokens=account.disk_tokens,
            ended_unix_s=time.time(),
        )
        if self._attachment is None:
            self._num_dropped += len(self._kept) == self._kept.maxlen
            self._kept.append(report)
        elif self._attachment.is_behind:
            self._num_dropped += 1
        else:
            self._send(self._attachment, report)

    def _send(self, attachment: Attachment, *reports: pb.RequestEnded) -> None:
        message = pb.RequestsEnded(requests=reports, num_dropped=self._num_dropped)
        self._num_dropped = 0
        attachment.send_later(pb.EngineMessage(requests_ended=message))


def _bounded(request_id: str) -> str:
    """Return what a message may have of an id that any client chose: whole characters, no NUL, not nothing."""
    text = request_id.replace("\0", "").encode(errors="replace")[: REQUEST_ID.max_bytes]
    return text.decode(errors="ignore") or "-"
