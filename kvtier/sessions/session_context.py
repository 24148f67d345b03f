"""What the parts of a session share."""

from collections.abc import Callable
from dataclasses import dataclass

from kvtier.concurrency.tasks import Tasks
from kvtier.sessions.engine_peer import EngineHello, EnginePeer
from kvtier.tiering.resources import Resources
from kvtier.tiering.tiers import Tiers


@dataclass(kw_only=True)
class SessionContext:
    """One session, as its loads and stores see it.

    Attributes:
        session_id: For logs and names of tasks.
        hello: How the engine introduced itself.
        peer: Its stream.
        tiers: Of its namespace.
        resources: Shared by all namespaces.
        tasks: Of its namespace.
        top_up_all: Called when host memory came free: grants it to sessions that are short of credits.
        ended: The stream is gone.
    """

    session_id: str
    hello: EngineHello
    peer: EnginePeer
    tiers: Tiers
    resources: Resources
    tasks: Tasks
    top_up_all: Callable[[], None]
    ended: bool = False
