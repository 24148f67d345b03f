"""What can be seen of a running kvtier: log events (`log`) and counters (`counters`)."""

from kvtier.obs.counters import Counters
from kvtier.obs.log import log_event, setup_logging

__all__ = ["Counters", "log_event", "setup_logging"]
