"""The daemon's behaviour, free of gRPC: namespaces, sessions, prompts, promotion and write-back to disk.

Everything here runs on one event loop thread; only disk, arena backing and the ledger run in worker threads.
"""

from kvtier.service.cache import Cache
from kvtier.sessions.engine_peer import EngineHello, EnginePeer

__all__ = ["Cache", "EngineHello", "EnginePeer"]
