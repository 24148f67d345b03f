"""`python -m tests.fakes.member_engine SOCKET DAEMON_UID [--stay]`: an engine of a user in the daemon's group.

Checks the socket as clients do, attaches, takes a pinned prompt up, stores its chunks and reads them back from the
arena; prints how many were right. With --stay it stays attached until stdin ends.
"""

import asyncio
import sys
from pathlib import Path

from kvtier.client.trusted_socket import open_trusted
from tests.fakes.scripted_engine import ScriptedEngine
from tests.unit.deployment.contained_engine import KEYS, client_config


async def serve(socket: Path, daemon_uid: int, *, stays: bool) -> None:
    """Store, read and print."""
    open_trusted(socket, daemon_uid).close()
    async with ScriptedEngine(client_config(socket)) as engine:
        (pin,) = engine.welcome.pins
        await engine.bind(pin.pin_id, KEYS)
        await engine.store(KEYS)
        print(len(await engine.verify(1, KEYS)), flush=True)
        if stays:
            await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2]), stays="--stay" in sys.argv[3:]))
