"""What can be seen of a running kvtier: log events (`log`), and metrics, which the other modules declare and serve."""

from kvtier.obs.counters import Counters
from kvtier.obs.log import log_event, setup_logging

__all__ = ["Counters", "log_event", "setup_logging"]
