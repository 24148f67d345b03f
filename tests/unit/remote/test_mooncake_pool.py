"""A pool whose client hangs at its start, without Mooncake: a module of its name, in the client's process."""

import asyncio
import os
from pathlib import Path

import pytest

from kvtier.errors import RemoteUnavailableError
from kvtier.remote import mooncake_pool
from kvtier.remote.mooncake_pool import MooncakePool

HANGS = """
import threading

class ReplicateConfig: pass

class SoftPinAction: ENABLE = 1

class MooncakeDistributedStore:
    def setup(self, *_):
        threading.Event().wait()
"""


def test_a_client_that_does_not_start_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a restore's calls started it again, one after the other: 40 calls to a master that is stopped, a quarter
    of an hour."""
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "store.py").write_text(HANGS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(mooncake_pool, "_START_S", 0.2)
    monkeypatch.setattr(mooncake_pool, "_END_S", 0.1)
    starts, start = list[str](), mooncake_pool._Client.start

    async def counted(client: mooncake_pool._Client, master: str) -> int:
        starts.append(master)
        return await start(client, master)

    monkeypatch.setattr(mooncake_pool._Client, "start", counted)

    async def test() -> None:
        pool = MooncakePool("mooncake://127.0.0.1:1/kvtier")
        calls = (pool.get(f"kv/a.{number}") for number in range(20))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(answer) for answer in answers} == {RemoteUnavailableError}
        assert len(starts) == 1
        with pytest.raises(RemoteUnavailableError, match="does not start"):
            await pool.get("kv/a.0")
        assert len(starts) == 2
        await pool.close()

    asyncio.run(test())
