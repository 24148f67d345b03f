"""What a running kvtier shows: log events, spans, and the metrics with their HTTP server."""

from kvtier.obs.counters import Counters
from kvtier.obs.log import log_event, setup_logging

__all__ = ["Counters", "log_event", "setup_logging"]
