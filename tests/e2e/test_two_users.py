"""A real vLLM of another user in the daemon's group: it stores a pinned prompt, and gets it back from host and disk."""

import json
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import make_model
from benchmarks.harness.process import wait_until
from tests.e2e.harness import EVICTING, as_pinned, ask, flood, tokens
from tests.fakes.other_users import User, as_user, made_group, made_users, why_not
from tests.fakes.two_users import World, world_of

pytestmark = pytest.mark.skipif(bool(reason := why_not()), reason=reason)
START_DEADLINE_S = 600

PREFIX, QUESTION = tokens(1, 640), tokens(2, 40)


def engine_of(world: World, user: User) -> Engine:
    """Return a vLLM that runs as a user, with a home and a model of its own."""
    home, model = world.folder / "home", world.folder / "model"
    home.mkdir()
    shutil.chown(home, user.uid, user.gid)
    make_model(model, TINY)
    for path in (model, *model.rglob("*")):
        path.chmod(0o755)
    options = EngineOptions(
        model=str(model),
        kvtier_socket=world.config.server.socket,
        connector_config=EVICTING | {"daemon_uid": world.daemon.uid},
    )
    engine = Engine(options, world.folder / "vllm.log")
    named = {"HOME": str(home), "TMPDIR": str(home), "TORCHINDUCTOR_CACHE_DIR": str(home), "USER": user.name}
    engine.argv = as_user(user, engine.argv, named)
    return engine


def test_a_vllm_of_another_user_stores_and_restores_a_pinned_prompt() -> None:
    with (
        made_users("daemon", "engine", "other") as made,
        made_group(made["daemon"], made["engine"]) as (name, gid),
        world_of((made["daemon"], made["engine"], made["other"], name, gid), host_bytes=256 << 20) as world,
    ):
        pinned = world.folder / "tokens.json"
        pinned.write_text(json.dumps(as_pinned(PREFIX)))
        pinned.chmod(0o644)

        def cli(*arguments: str) -> str:
            code, printed = world.cli(world.engine, *arguments)
            assert code == 0, printed
            return printed

        def restored(engine: Engine, first: int) -> Mapping[str, int]:
            flood(engine, first)
            return ask(engine, PREFIX + QUESTION).by_source

        engine = engine_of(world, world.engine)
        with world.serving("log"), ExitStack() as stack:
            engine.launch()
            stack.callback(engine.__exit__, None, None, None)
            engine.wait_started(START_DEADLINE_S)
            assert _uid_of(engine.pid) == world.engine.uid
            wait_until(lambda: "No engine is attached" not in cli("status"), 60, "vLLM to attach")
            cli("pin", "p", "--tokens", str(pinned), "--model", "model", "--url", engine.url)
            assert restored(engine, 10_000)["host"] == len(PREFIX)
            cli("evict", "p", "--tier", "host")
            assert restored(engine, 20_000)["disk"] == len(PREFIX)
            (arena,) = world.config.host.arena_dir.glob("arena-*")
            assert arena.stat().st_uid == world.daemon.uid


def _uid_of(pid: int) -> int:
    return Path(f"/proc/{pid}").stat().st_uid
