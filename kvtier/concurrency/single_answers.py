"""A connection of uvicorn that answers each request once, whatever its client sends behind it."""

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class SingleAnswerProtocol(H11Protocol):
    """Closes where uvicorn's own would answer twice, and end in a traceback."""

    def send_400_response(self, msg: str) -> None:
        """See H11Protocol, which would answer twice where a body is no HTTP, and HEAD with a body."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # what the application answers from now on is dropped
            self.cycle.message_event.set()
        state = self.conn.our_state
        if state is h11.IDLE or (state is h11.SEND_RESPONSE and self.scope["method"] != "HEAD"):
            super().send_400_response(msg)
        else:
            self.transport.close()
