"""A host is lost with all it had, and its prompts come back from the store: real daemons, vLLM, CLI and S3 server."""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import cached_model
from benchmarks.harness.process import wait_until
from tests.e2e.conftest import Note
from tests.e2e.equality import Comparisons
from tests.e2e.harness import EVICTING, HANG_S, Answer, Stack, ask, forget_gpu, prefix_cache_hit, running_stack, tokens
from tests.fakes.s3_server import CREDENTIALS, make_bucket, s3_server

PREFIX = tokens(1, 640)
OTHER = tokens(2, 320)
QUESTION = tokens(4, 40)


@dataclass
class World:
    """Three hosts with a store between them, and an engine on the first one.

    Attributes:
        reference: Answer with the prefix computed by vLLM.
    """

    here: Stack
    there: Stack
    third: Stack
    engine: Engine
    reference: Answer


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    options = EngineOptions(model=str(cached_model("tiny", TINY)), connector_config=EVICTING)
    with s3_server() as url, ExitStack() as stack:
        make_bucket(url, "fleet")
        settings = {"KVTIER_REMOTE_URL": "s3://fleet/tests", "KVTIER_REMOTE_POLL": "1s", "AWS_ENDPOINT_URL": url}
        hosts = [stack.enter_context(running_stack(options, daemon_settings=settings | CREDENTIALS)) for _ in range(3)]
        engine = stack.enter_context(hosts[0].engine())
        here, there, third = hosts
        yield World(here, there, third, engine, prefix_cache_hit(engine, PREFIX, QUESTION))


def names(stack: Stack) -> set[str]:
    return {prompt["name"] for prompt in stack.json("list") if prompt["pinned"]}


def test_a_pin_goes_to_the_store_with_its_kv(world: World) -> None:
    here, engine = world.here, world.engine
    here.pin("support", PREFIX, engine, "--priority", "5", "--label", "app=chat")
    here.wait_durable("support")
    fields = ("num_pins", "num_kv_objects", "num_waiting_pins", "problem")

    def is_shared() -> bool:
        status = here.json("remote")
        return [status[field] for field in fields] == [1, 1, 0, ""]

    wait_until(is_shared, HANG_S, "the pin and its KV to be in the store")
    assert here.json("remote")["spending"]["dollars"] > 0
    assert "s3://fleet/tests" in here.cli("remote").stdout


def test_a_pin_on_one_host_is_everybodys(world: World) -> None:
    here, there = world.here, world.there
    for other in (there, world.third):
        wait_until(lambda other=other: "support" in names(other), HANG_S, "the other host to know the pin")  # type: ignore[misc]
    shown = there.json("show", "support")
    assert (shown["priority"], shown["labels"]) == (5, {"app": "chat"})
    wait_until(lambda: len(there.json("remote")["hosts"]) == 3, HANG_S, "all hosts to be known")
    there.cli("set", "support", "--priority", "7")
    wait_until(lambda: here.json("show", "support")["priority"] == 7, HANG_S, "the priority to be known here")
    path = there.home / "other.json"
    path.write_text(json.dumps(OTHER))
    there.cli("pin", "other", "--tokens", str(path), "--url", "http://127.0.0.1:9")
    wait_until(lambda: "other" in names(here), HANG_S, "the pin to be known here")
    there.cli("unpin", "other")
    wait_until(lambda: "other" not in names(here), HANG_S, "the pin to end here")


def test_a_host_that_lost_everything_serves_from_the_store(world: World, compare: Comparisons, note: Note) -> None:
    here, engine = world.here, world.engine
    here.daemon.kill()
    here.daemon.lose_memory()
    shutil.rmtree(here.daemon.disk_dir)
    here.daemon.start()
    waited_s = wait_until(lambda: here.run("ready", "--tier", "host").returncode == 0, 90, "the host to be ready")
    here.wait_attached(engine)  # the prompt may be in memory before the engine has bound its pin
    forget_gpu(engine)
    answer = ask(engine, [*PREFIX, *QUESTION])
    assert answer.restored_tokens == len(PREFIX), answer.by_source
    compare.same_logprobs(answer, world.reference)
    here.wait_durable("support")
    assert here.json("remote")["num_restored"] == 1
    note(f"ready {waited_s:.1f} s after the new daemon")
