"""A start over a ledger some of whose rows refer to what is not there: the others serve."""

import asyncio
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from kvtier.config import DaemonConfig
from tests.fakes.operator import make_durable, prompt_of, status_of
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, running, wait_durable

KEYS = [chunk_key(n) for n in range(3)]
OTHERS = [chunk_key(n) for n in range(10, 13)]


async def two_prompts(config: DaemonConfig) -> str:
    """Make p durable in one namespace and q in another; return the latter's id."""
    async with running(config) as stub:
        async with ScriptedEngine(config) as engine:
            await make_durable(stub, engine, KEYS)
        async with ScriptedEngine(config, model_names=["other"], fingerprint={"weights": "2"}) as engine:
            pin_id = await make_durable(stub, engine, OTHERS, "q")
            assert pin_id
            return str(engine.welcome.namespace_id)


@pytest.mark.parametrize("table", ["prompts", "namespaces"])
def test_a_binding_of_nothing_is_passed_over(tmp_path: Path, table: str) -> None:
    """No way to this state is known; a daemon that did not start for it could not be repaired from inside."""

    async def scenario() -> None:
        config = config_in(tmp_path)
        namespace_id = await two_prompts(config)
        with closing(sqlite3.connect(config.disk.disk_dir / "ledger.sqlite")) as sql:  # which minds no references
            if table == "prompts":
                shutil.rmtree(config.disk.disk_dir / "promises")  # or it would come back from its copy
                sql.execute("DELETE FROM prompts WHERE name = 'q'")
            else:
                sql.execute("DELETE FROM namespaces WHERE namespace_id = ?", [namespace_id])
            sql.commit()
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await wait_durable(stub, "p")
            assert len(await engine.acquire(1, KEYS)) == len(KEYS)
            assert (await status_of(stub)).num_prompts == (1 if table == "prompts" else 2)
            if table == "namespaces":
                assert list((await prompt_of(stub, "q")).bindings) == []

    asyncio.run(scenario())
