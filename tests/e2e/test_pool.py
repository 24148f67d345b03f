"""A prompt that is pinned on one host is served on another one from the pool: real daemons, vLLM, CLI and Mooncake."""

import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.harness.engine import EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import cached_model
from benchmarks.harness.process import wait_until
from tests.e2e.conftest import Note
from tests.e2e.equality import Comparisons
from tests.e2e.harness import EVICTING, ask, forget_gpu, prefix_cache_hit, running_stack, tokens
from tests.fakes.mooncake_cluster import is_installed, mooncake_cluster

PREFIX = tokens(1, 640)
QUESTION = tokens(4, 40)


def spoil(folder: Path) -> None:
    """Leave no byte as it was in the store's KV: only the pool has it."""
    for path in folder.rglob("*.safetensors"):
        path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.skipif(not is_installed(), reason="mooncake is not installed; see make test-mooncake")
def test_a_pin_of_one_host_is_served_on_another_from_the_pool(tmp_path: Path, compare: Comparisons, note: Note) -> None:
    options = EngineOptions(model=str(cached_model("tiny", TINY)), connector_config=EVICTING)
    with mooncake_cluster() as cluster, ExitStack() as stack:
        settings = {"REMOTE_URL": f"file://{tmp_path}", "REMOTE_POOL": cluster.url, "REMOTE_POLL": "1s"}
        settings = {f"KVTIER_{name}": value for name, value in settings.items()}
        here, there = (stack.enter_context(running_stack(options, daemon_settings=settings)) for _ in range(2))
        with here.engine() as engine:
            reference = prefix_cache_hit(engine, PREFIX, QUESTION)
            here.pin("support", PREFIX, engine)
            here.wait_durable("support")
            wait_until(lambda: here.json("remote")["num_kv_objects"] == 1, 60, "the KV to be in the store")
        spoil(tmp_path / "store" / "kv")
        here.daemon.kill()
        with there.engine() as engine:
            wait_until(lambda: there.run("ready", "--tier", "host").returncode == 0, 90, "the other host to be ready")
            forget_gpu(engine)
            began_s = time.monotonic()
            answer = ask(engine, [*PREFIX, *QUESTION])
            note(f"answered in {time.monotonic() - began_s:.2f} s from {cluster.url}")
            assert answer.restored_tokens == len(PREFIX), answer.by_source
            compare.same_logprobs(answer, reference)
            assert there.json("remote")["num_restored"] == 1
