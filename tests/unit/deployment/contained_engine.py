"""`python -m tests.unit.deployment.contained_engine SOCKET`: an engine that runs where vLLM's container would.

Attaches, takes a pinned prompt up, stores its chunks and reads them back; prints how many were right.
"""

import asyncio
import sys
from pathlib import Path

from kvtier.config import DaemonConfig, DiskConfig, HostConfig, ServerConfig
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key

KEYS = [chunk_key(n) for n in range(3)]


async def serve(socket: Path) -> int:
    """Return how many chunks were read back as they were stored."""
    async with ScriptedEngine(client_config(socket)) as engine:
        (pin,) = engine.welcome.pins
        await engine.bind(pin.pin_id, KEYS)
        await engine.store(KEYS)
        return len(await engine.verify(1, KEYS))


def client_config(socket: Path) -> DaemonConfig:
    """Return what a client knows: the socket; the arena's path comes from the daemon."""
    nowhere = Path("/nonexistent")
    return DaemonConfig(
        server=ServerConfig(socket=socket),
        host=HostConfig(arena_dir=nowhere, host_bytes=0),
        disk=DiskConfig(disk_dir=nowhere, disk_bytes=0),
    )


if __name__ == "__main__":
    print(asyncio.run(serve(Path(sys.argv[1]))))
